"""`kvarn bench`: what it measures is what it says. No test looks at how fast anything was."""

import json
from pathlib import Path

import pytest
from support import tiny_gguf
from support.tiny_models import GOLDEN

from kvarn import KvarnError, SamplingParams
from kvarn.bench import suite
from kvarn.bench.case import Case
from kvarn.bench.ids import RandomIds, TextIds
from kvarn.bench.machine import Bandwidth
from kvarn.bench.subject import EngineSubject, Setup
from kvarn.cache.strategy import NAMES
from kvarn.cli import bench_serve, main
from kvarn.llm import LLM


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("bench") / "tiny.gguf", "llama", tiny_gguf.CHAT)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, context=32)


def subject_of(llm: LLM, batch: int, **setup) -> EngineSubject:
    return suite.subject(llm, Setup(**{"chunk": 32} | setup), [Case("pp", 100, 140, batch)])


def json_of(capsys: pytest.CaptureFixture, path: Path, *flags: str) -> dict:
    assert main(["bench", "-m", str(path), *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# -- rows ------------------------------------------------------------------------------------------------------------

FIELDS = {"test", "depth", "batch", "cache", "cache_type", "threads", "tok_s", "spread", "gb_s", "bytes_per_token"}


COMBINED = "-p 8 -n 4 -d 0,40 -b 1,2 --cache paged,contiguous --cache-type bf16,int8 -t 1 -r 2"


@pytest.mark.requirement(38)
def test_one_row_per_combination(path: Path, capsys: pytest.CaptureFixture) -> None:
    result = json_of(capsys, path, *COMBINED.split())
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    assert len({(r["test"], r["depth"], r["batch"], r["cache"], r["cache_type"]) for r in rows}) == len(rows)
    for row in rows:
        assert FIELDS | {"bandwidth_share", "samples", "strategy", "layout"} <= set(row)
        assert row["threads"] == 1
        assert row["strategy"] == row["cache"]
        assert len(row["samples"]) == 2
        assert row["tok_s"] > 0
        assert row["bandwidth_share"] > 0
        assert row["spread"] >= 0
    machine = result["machine"]
    assert machine["threads"] == 1
    assert machine["read_gb_s"]


LEFT_OUT = {"-p 0 -n 4": {"tg4"}, "-p 8 -n 0": {"pp8"}, "-p 8,9 -n 0": {"pp8", "pp9"}}


@pytest.mark.parametrize(("flags", "tests"), LEFT_OUT.items())
def test_zero_leaves_a_test_out(flags: str, tests: set[str], path: Path, capsys: pytest.CaptureFixture) -> None:
    result = json_of(capsys, path, *flags.split(), "-r", "1")
    assert {row["test"] for row in result["rows"]} == tests


def test_the_table_is_aligned(path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "-m", str(path), "-p", "8", "-n", "4", "-d", "0,100", "-r", "1"]) == 0
    captured = capsys.readouterr()
    table = captured.out.splitlines()[2:]
    assert len(table) == 1 + 4
    assert len({len(line) for line in table}) == 1
    assert "auto -> contiguous" in table[1]
    assert captured.err == ""


def test_a_text_fills_the_cache(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question.")
    result = json_of(capsys, path, "-p", "8", "-n", "4", "-d", "100", "-b", "3", "-r", "1", "-f", str(text))
    assert len(result["rows"]) == 2


BAD = {
    "nothing": ("-p 0 -n 0", "nothing to measure"),
    "negative": ("-p -8", "-p -8: it must be at least 0"),
    "no batch": ("-b 0", "-b 0: it must be at least 1"),
    "no repetition": ("-r 0", "0 repetitions"),
    "too deep": ("-d 400 -p 8 -n 4", "needs a context of 410 tokens and the model was trained for 256"),
    "batch above the step": ("-b 8 -ub 4", "a batch of 8 does not fit a step of 4 tokens"),
    "block size": ("--block-size 24 -p 8 -n 4", "it must be a power of two from 16"),
    "no text": ("-f /nowhere", "/nowhere: No such file"),
    "peer": ("--against faster -p 8 -n 4", "--against 'faster': give the URL of a server, llama-cpp-python"),
    "no server": ("--against http://127.0.0.1:1 -p 8 -n 4", "is the server running?"),
    "no interpreter": ("-p 8 -n 4 --against llama-cpp-python --against-python /nowhere", "/nowhere: No such file"),
}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_flags_get_one_line(flags: str, message: str, path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "-m", str(path), *flags.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvarn bench: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_an_interruption_keeps_the_rows_so_far(
    path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = suite.measure

    def measure(*args):
        if args[2].kind == "tg":
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(suite, "measure", measure)
    assert main(["bench", "-m", str(path), "-p", "8", "-n", "4", "-r", "1", "--json"]) == 130
    assert [row["test"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["pp8"]


def test_serve_goes_to_its_own_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench_serve, "add", lambda parser: parser.add_argument("-n", "--number", type=int))
    monkeypatch.setattr(bench_serve, "run", lambda args: print("served", args.number))
    assert main(["bench", "serve", "-n", "7"]) == 0
    assert capsys.readouterr().out == "served 7\n"


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", NAMES)
def test_the_depth_is_reached_and_kept(cache: str, llm: LLM) -> None:
    window = {"window": 48} if cache in ("ring", "sliding", "sinks") else {}
    ours = subject_of(llm, 3, cache=cache, **window)
    for depth in (0, 50, 140):
        for case in (Case("pp", 20, depth, 3), Case("tg", 5, depth, 3)):
            ours.prepare(case)
            assert ours.depths == [depth] * 3
            for _ in range(2):
                reading = ours.measure(case)
                assert reading.tokens == 3 * case.n
                assert ours.depths == [depth + case.n] * 3
                assert reading.seconds > 0
    ours.close()
    assert not ours.engine.busy
    ours.engine.cache.check()


def test_tokens_are_those_that_the_engine_generates(path: Path, llm: LLM) -> None:
    ours = subject_of(llm, 2, cache="paged")
    case = Case("tg", 12, 60, 2)
    ours.prepare(case)
    ours.measure(case)
    ours.measure(case)
    prompts = [ours.ids(i, 61) for i in range(2)]
    outputs = LLM(path, context=128).generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    for sample, output in zip(ours.samples, outputs, strict=True):
        assert sample.tokens[61:] == output.tokens


def test_a_cache_fills_once(llm: LLM) -> None:
    ours = subject_of(llm, 2, cache="contiguous")

    def computed() -> int:
        return ours.engine.stats.prefill_tokens + ours.engine.stats.decode_tokens

    deep, deeper = Case("tg", 10, 100, 2), Case("tg", 10, 140, 2)
    ours.prepare(deep)
    before = computed()
    for _ in range(3):
        ours.measure(deep)
    assert computed() - before == 3 * 10 * 2, "a repetition computes what it measures"
    before = computed()
    ours.prepare(deeper)
    assert computed() - before == 2 * (40 + 8), "from 100 to 140, and the warm-up"


def test_bytes_are_the_weights_and_the_cells_of_every_step(llm: LLM) -> None:
    per_token = GOLDEN.n_layers * 2 * GOLDEN.n_kv_heads * GOLDEN.head_dim * 2  # keys and values, bf16
    ours = subject_of(llm, 2, cache="contiguous")
    reading = ours.measure(Case("tg", 3, 100, 2))
    assert reading.steps == 3
    assert reading.nbytes == 3 * llm.program.nbytes + 2 * per_token * (101 + 102 + 103)


def test_sequences_share_nothing(llm: LLM) -> None:
    ours = subject_of(llm, 3, cache="paged")
    ours.prepare(Case("tg", 4, 128, 3))
    tables = [p.residency(s.id).blocks[:4] for p in ours.engine.cache.placements for s in ours.samples]
    blocks = [block for row in tables for block in row]
    assert len(set(blocks)) == len(blocks) == 12


def test_ids() -> None:
    ids = RandomIds(1000, 50)
    assert ids(0, 50)[:20] == ids(0, 20) != ids(1, 20)
    assert RandomIds(1000, 50)(1, 9) == ids(1, 9)
    text = TextIds([1, 2, 3, 4, 5], 2, 9)
    assert text(0, 7) == [1, 2, 3, 4, 5, 1, 2]
    assert text(1, 9) == [3, 4, 5, 1, 2, 3, 4, 5, 1]
    with pytest.raises(KvarnError, match="5 tokens, too few for 6"):
        TextIds([1, 2, 3, 4, 5], 6, 9)


def test_bandwidth_is_measured_once_per_size() -> None:
    bandwidth = Bandwidth(2)
    assert bandwidth.at(3 << 20) == bandwidth.at((3 << 20) - 5) > 0
    assert list(bandwidth.measured) == [3 << 20]
    bandwidth.at(10)
    assert list(bandwidth.measured) == [3 << 20, 1 << 20]
