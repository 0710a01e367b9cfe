"""`kvarn plan` as a person reads it, its errors, and that it loads no weights."""

import json
from pathlib import Path

import pytest
from support.fake_cuda import install
from support.serving import tiny_model
from support.tiny_files import write_hf

from kvarn.backends.cpu import program as programs
from kvarn.cli import main, plan
from kvarn.cli.plan import parse_depths
from kvarn.cli.plan_check import Truth
from kvarn.cli.plan_words import rate, seconds
from kvarn.errors import OutOfMemory
from kvarn.forecast.truth import Measured


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def model(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVARN_CACHE", str(cache))
    monkeypatch.setattr(plan, "resident_bytes", lambda: 50 << 20)  # that of the tests grows
    return str(tiny_model(tmp_path))


def planned(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    assert main(["plan", *words, "-t", "1"]) == 0
    return capsys.readouterr().out.splitlines()


def facts(capsys: pytest.CaptureFixture, *words: str) -> dict:
    return json.loads("\n".join(planned(capsys, *words, "--json")))


def test_a_page_for_people(model: str, capsys: pytest.CaptureFixture) -> None:
    lines = planned(capsys, model, "-np", "2", "--depth", "0,1k")
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert names[:7] == ["model", "machine", "weights", "cache", "workspace", "process", "total"]
    assert any(line.startswith("cache") and "2 x 2,048 tokens, paged, bf16" in line for line in lines)
    assert any(line.endswith("free here: fits") for line in lines)
    header = next(line for line in lines if line.lstrip().startswith("depth"))
    assert header.split() == ["depth", "tokens/s", "limit", "MB/token", "first", "token"]
    assert [line.split()[0] for line in lines[lines.index(header) + 1 :][:2]] == ["0", "1,024"]
    assert any(line.startswith("batch") and "2 sequences together" in line for line in lines)
    assert any(line.startswith("would fit") for line in lines)
    assert max(map(len, lines[1:])) <= 100, "the first line has the path"


def test_no_weights_are_read(model: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has a header and holes instead of weights gives the same plan."""
    whole = facts(capsys, model)
    content = Path(model).read_bytes()
    monkeypatch.setattr(programs, "load_program", None)
    with open(model, "r+b") as file:
        file.truncate(len(content) - 100_000)
        file.truncate(len(content))
    again = facts(capsys, model)
    for key in ("cache", "depths", "prompt", "read_gb_s"):
        assert again[key] == whole[key], "and the machine was measured once"
    assert again["memory"] == whole["memory"]


def test_a_folder(tmp_path: Path, model: str, capsys: pytest.CaptureFixture) -> None:
    folder = write_hf(tmp_path / "folder", "qwen2", shards=2)
    assert facts(capsys, str(folder), "-c", "32")["architecture"] == "qwen2"


def test_a_machine_that_is_too_small(model: str, capsys: pytest.CaptureFixture) -> None:
    found = facts(capsys, model, "-np", "4", "--memory", "1G")
    assert (found["budget"], found["budget_given"], found["fits"]) == (1 << 30, True, True)
    other = found["memory"]["total"] - found["memory"]["cache"] // 2
    found = facts(capsys, model, "-np", "4", "--memory", str(other))
    assert found["fits"] is False
    first = found["would_fit"][0]
    assert first["flags"] == [f"-np {first['sequences']}"]
    assert first["bytes"] <= other
    lines = planned(capsys, model, "-np", "4", "--memory", str(other))
    assert any(line.endswith("given: DOES NOT FIT") for line in lines)
    assert any(line.startswith("would fit  -np ") for line in lines)
    lines = planned(capsys, model, "--memory", "1M")
    assert lines[-1] == "would fit  nothing with these weights: take a smaller model, or one with fewer bits"


@pytest.mark.parametrize("cache_type", ["f32", "int8"])
def test_settings_change_the_plan(model: str, capsys: pytest.CaptureFixture, cache_type: str) -> None:
    plain, other = facts(capsys, model), facts(capsys, model, "--cache-type", cache_type)
    assert other["cache"]["codec"] == cache_type
    assert (other["memory"]["cache"] > plain["memory"]["cache"]) == (cache_type == "f32")
    rolled = facts(capsys, model, "--cache", "sinks", "-c", "64")
    assert (rolled["cache"]["windows"], rolled["cache"]["context"]) == ([64], 2048)


def test_the_truth_beside_it(model: str, capsys: pytest.CaptureFixture) -> None:
    lines = planned(capsys, model, "-c", "256", "--depth", "0,128", "--check")
    table = lines[next(n for n, line in enumerate(lines) if line.split() == ["forecast", "truth", "error"]) :]
    names = ["memory", "tokens/s at 0", "first token of 1", "tokens/s at 128", "first token of 114"]
    assert [" ".join(line.split()[: len(name.split())]) for line, name in zip(table[1:], names, strict=True)] == names
    assert all(line.endswith(" %") for line in table[1:])


ERRORS = {
    "depth": ("--depth 99999999", "--depth 99999999: the context has 2,048 tokens, and one must be left to compute"),
    "depth text": ("--depth 4k,x", "--depth is '4k,x'; it must be numbers of tokens with commas between them"),
    "depth empty": ("--depth=", "--depth is ''; it must be numbers of tokens"),
    "depth negative": ("--depth=-1", "--depth is '-1'; it must be numbers of tokens"),
    "memory": ("--memory 0", "--memory is 0 bytes; give what the machine has"),
    "memory text": ("--memory much", "--memory is 'much'; it must be a number of bytes"),
    "context": ("-c 99999", "was trained for 2,048 tokens; give at most that"),
    "sequences": ("-np 0", "-np is 0; it must be at least 1"),
    "too large to check": ("--check -np 60000", "--check would load a model that does not fit this machine"),
    "reference": ("--backend reference", "plans are for the backends cpu and cuda"),
}


@pytest.mark.parametrize(("words", "error"), ERRORS.values(), ids=ERRORS)
def test_errors_are_one_line(model: str, capsys: pytest.CaptureFixture, words: str, error: str) -> None:
    assert main(["plan", model, *words.split()]) in (1, 2)
    out, said = capsys.readouterr()
    assert out == ""
    assert said.count("\n") == 1
    assert error in said


def test_models_that_it_cannot_run(tmp_path: Path, model: str, capsys: pytest.CaptureFixture) -> None:
    for name, error in (
        (str(tmp_path / "none.gguf"), "no such file or folder"),
        (str(tmp_path), "has no config.json, so it is no model"),
        ("smollm2", "is not on this machine, and it comes as a whole: run `kvarn pull smollm2`"),
    ):
        assert main(["plan", name]) == 1
        assert error in capsys.readouterr().err
    other = tmp_path / "other.gguf"
    other.write_bytes(
        Path(model)
        .read_bytes()
        .replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", 1)
    )
    assert main(["plan", str(other)]) == 1
    assert "is a mamba model, and kvarn runs: " in capsys.readouterr().err


def test_a_failed_check_says_why(model: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_ISA", "none of them")  # read when the other process imports kvarn
    assert main(["plan", model, "-c", "64", "-t", "1", "--check"]) == 1
    out, said = capfd.readouterr()
    assert out == ""
    assert "instruction set 'none of them' does not run here" in said


def test_words() -> None:
    assert parse_depths("0,4k,32K,1m,0") == (0, 4096, 32768, 1 << 20)
    assert [rate(number) for number in (3.14159, 999.94, 12345.6)] == ["3.1", "999.9", "12,346"]
    assert [seconds(number) for number in (0.0051, 0.9994, 1.25, 4321.0)] == ["5 ms", "999 ms", "1.2 s", "4,321.0 s"]


def test_a_device(model: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    found = facts(capsys, model)
    assert (found["backend"]["name"], found["fits"]) == ("cuda", True)
    assert [each["depth"] for each in found["depths"]] == [0, 1024, 2047]
    assert all(each["tok_s"] > 0 and each["first_token_seconds"] > 0 for each in found["depths"])
    assert found["prompt"]["tokens"] == 512
    assert facts(capsys, model) == found, "seconds are kept"
    assert found["device"]["total"] == sum(found["device"][key] for key in ("weights", "beside", "cache"))
    assert found["device"]["total"] <= found["budget"]
    assert facts(capsys, model, "--backend", "cpu")["backend"]["name"] == "cpu"
    assert facts(capsys, model, "--memory", "4G")["backend"]["name"] == "cpu", "of another machine"
    lines = planned(capsys, model)
    assert [line.split()[0] for line in lines if line] == [
        *("model", "device", "weights", "cache", "beside", "total", "depth", "0", "1,024", "2,047", "prompt")
    ]
    assert main(["plan", model, "--depth", "2048"]) == 1
    assert "the context has 2,048 tokens" in capsys.readouterr().err
    truth = Truth(None, 1000, [Measured(0, 1, 0.5, 100.0), Measured(1024, 900, 0.25, 50.0)])
    monkeypatch.setattr(plan, "truth_of", lambda model, settings, depths: truth)
    check = facts(capsys, model, "--check")["check"]
    assert check["weight_bytes"]["truth"] == 1000
    assert check["depths"][1]["tok_s"]["error_share"] == pytest.approx(found["depths"][1]["tok_s"] / 50 - 1)
    assert "weight " in "\n".join(planned(capsys, model, "--check"))


def test_a_device_that_is_full(model: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned all the same."""
    install(monkeypatch)

    def refuse(*words: object, **more: object) -> None:
        raise OutOfMemory("the GPU has 1 MiB free")

    monkeypatch.setattr(plan, "speed_on_device", refuse)
    found = facts(capsys, model)
    assert (found["fits"], "depths" in found) == (True, False)


def test_a_device_that_is_not_here(model: str, capsys: pytest.CaptureFixture) -> None:
    found = facts(capsys, model, "--backend", "cuda", "--memory", "24G")
    assert (found["budget"], found["fits"], "depths" in found) == (24 << 30, True, False)
    assert any(line.startswith("speed ") for line in planned(capsys, model, "--backend", "cuda", "--memory", "24G"))
    assert main(["plan", model, "--backend", "cuda", "--memory", "24G", "--check"]) == 1
    assert "it needs a device that is there" in capsys.readouterr().err
    assert not facts(capsys, model, "--backend", "cuda", "--memory", "1G")["fits"]
    assert main(["plan", model, "--backend", "cuda", "--memory", "24G", "--cache-type", "f16/int8"]) == 1
    assert "the cuda backend has no f16/int8 cells" in capsys.readouterr().err


def test_a_host_cache_is_part_of_the_total(model: str, capsys: pytest.CaptureFixture) -> None:
    plain, more = facts(capsys, model, "--cache", "paged"), facts(capsys, model, "--host-cache", "64M")
    assert more["cache"]["strategy"] == "paged", "auto would share no prefixes"
    assert (plain["memory"]["evicted"], more["memory"]["evicted"]) == (0, 64 << 20)
    assert more["memory"]["total"] - plain["memory"]["total"] == 64 << 20
    assert any(line.startswith("evicted      64.0 MiB") for line in planned(capsys, model, "--host-cache", "64M"))
    assert main(["plan", model, "--host-cache", "1M", "--cache", "ring"]) == 1
    assert "shares no prefixes" in capsys.readouterr().err
