"""The backend in what commands say: which one, why, and on a device its facts."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
from support.fake_cuda import GIB, FakeCuda, FakeDriver, install
from support.serving import tiny_model

from kvarn import LLM
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.cli import inspect, main, serve
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.server.fingerprint import fingerprint_of

SCHEMAS = Path(inspect.__file__).parent / "schemas"
HELD = "auto: NVIDIA H200 is there and holds the weights"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), 512))


def said(capsys: pytest.CaptureFixture, *words: str) -> dict:
    """The checked JSON that a command prints."""
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema_rs.validator_for(json.loads((SCHEMAS / f"{words[0]}.json").read_text())).validate(found)
    return found


def test_run_and_bench_say_which_backend_and_why(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run, bench = ("run", "-m", model, "-p", "ab", "-n", "2"), ("bench", model, "-p", "4", "-n", "2", "-r", "1")
    here = said(capsys, *run)["backend"]
    assert (here["name"], here["chosen"]) == ("cpu", "auto: no NVIDIA device")
    install(monkeypatch)
    expected = {**FakeCuda().facts(), "chosen": HELD}
    assert said(capsys, *run)["backend"] == expected
    found = said(capsys, *bench)
    assert found["backend"] == expected
    assert {row["bandwidth_share"] for row in found["rows"]} == {None}, "not of the host's memory"
    assert found["machine"]["read_gb_s"] == {}
    assert main(list(bench)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny.gguf, NVIDIA H200"
    assert lines[-1].endswith(" -")


def test_a_benchmark_of_several_types_runs_on_a_backend_that_has_them_all(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    install(monkeypatch)
    found = said(capsys, "bench", model, "-p", "4", "-n", "0", "-r", "1", "-t", "1", "--cache-type", "f16/int8,bf16")
    assert found["backend"]["name"] == "cpu"
    assert "no f16/int8 cells" in found["backend"]["chosen"]
    assert [row["cache_type"] for row in found["rows"]] == ["f16/int8", "bf16"]


def test_strategies_choose_a_backend_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    words = ("strategies", "-n", "40", "-c", "64", "--cache", "paged")
    install(monkeypatch)
    assert said(capsys, *words, "--cache-type", "f16/int8")["backend"] == "cpu"
    assert main(list(words)) == 1
    assert capsys.readouterr().err == "kvarn strategies: the null backend has no layers\n", (
        "the fake's, so it was taken"
    )


def test_inspect_shows_what_auto_would_take(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(["inspect", model]) == 0
    assert "backend          cpu (auto: no NVIDIA device)\n" in capsys.readouterr().out
    assert said(capsys, "inspect", model)["backend"]["chosen"] == "auto: no NVIDIA device"
    backend = FakeCuda(exact="no")
    install(monkeypatch, backend=backend)
    assert main(["inspect", model]) == 0
    shown = capsys.readouterr().out
    wanted = weight_bytes(open_checkpoint(model))
    for line in (
        f"backend          cuda ({HELD})",
        "device           NVIDIA H200, 140.0 GiB, compute 9.0, driver 13.0",
        f"weights          {wanted / 2**20:.1f} MiB on the device",
        "kernels          50 from the package",
        "exact            no",
    ):
        assert f"{line}\n" in shown
    facts = said(capsys, "inspect", model)["backend"]
    assert facts["weight_bytes"] == wanted == sum(each["bytes"] for each in facts["weights"])
    assert {each["type"]: each["as"] for each in facts["weights"]} == {"F32": "f32"}
    for each in facts["weights"]:
        assert f"  {each['type']:<14} {each['as']}, {each['bytes'] / 2**20:.1f} MiB\n" in shown
    assert not backend.events, "no weights were loaded"
    install(monkeypatch, FakeDriver(free=GIB))
    found = said(capsys, "inspect", model)["backend"]
    assert found["name"] == "cpu"
    assert found["chosen"].endswith("and NVIDIA H200 has 1.0 GiB free")


def test_the_summary_and_the_fingerprint_of_a_server(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for exact, part in (("yes", "-cuda-bf16-"), ("no", "-cuda-inexact-bf16-")):
        install(monkeypatch, backend=FakeCuda(exact=exact))
        llm = LLM(model, context=64)
        line = serve.summary(llm, "tiny", "http://127.0.0.1:8000", 0)["backend"]
        assert line.startswith("cuda, device NVIDIA H200, memory 140.0 GiB, compute 9.0, driver 13.0, kernels 50 from")
        assert line.endswith(f", exact {exact} ({HELD})")
        assert part in fingerprint_of(llm)


@pytest.mark.parametrize(
    "command", ["run -p ab", "bench -n 1 -p 0", "perplexity -f {text}", "compare -f {text}", "strategies"]
)
def test_cuda_by_name_without_a_device_is_one_line(
    command: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 40)
    words = command.format(text=text).split()
    named = () if words[0] == "strategies" else ("-m", model)
    assert main([*words, *named, "--backend", "cuda"]) == 1
    out, err = capsys.readouterr()
    line = "the cuda backend cannot run here: no NVIDIA device; --backend cpu works everywhere"
    assert (out, err) == ("", f"kvarn {words[0]}: {line}\n")
