"""Peers beside kvarn in a benchmark: interleaved, with their best settings, and clear when they cannot be had."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support import tiny_gguf
from support.tiny_models import GOLDEN

from kvarn import KvarnError
from kvarn.bench import suite
from kvarn.bench.case import Case, Figure, Reading, cases
from kvarn.bench.machine import Bandwidth, cpu_name
from kvarn.bench.peers import llamacpp
from kvarn.bench.peers.recorded import SHAPE, Recorded, Speed, main_type
from kvarn.bench.peers.server import Server
from kvarn.bench.subject import Setup
from kvarn.cli import main

LONGEST = GOLDEN.context - 1


class Scripted:
    """A subject with given rates that logs its calls."""

    def __init__(self, name: str, log: list[str], rates: list[float]) -> None:
        self.name, self.log, self.rates = name, log, iter(rates)

    def prepare(self, case: Case) -> None:
        self.log.append(f"{self.name} ready")

    def measure(self, case: Case) -> Reading:
        self.log.append(self.name)
        return Reading(100, 100 / next(self.rates), 1000, 10)

    def describe(self) -> dict[str, object]:
        return {"engine": self.name}


def test_repetitions_are_interleaved_and_compared_pairwise() -> None:
    log: list[str] = []
    ours, theirs = Scripted("ours", log, [10, 40, 30]), Scripted("theirs", log, [5, 10, 10])
    row = suite.measure(ours, theirs, Case("tg", 100), Setup(), 3, Bandwidth(1))
    assert log == ["ours ready", "theirs ready", *["ours", "theirs"] * 3]
    assert row["tok_s"] == pytest.approx(30)
    assert row["spread"] == pytest.approx(1)
    against = row["against"]
    assert against["tok_s"] == pytest.approx(10)
    assert against["ratio"] == pytest.approx(3), "of 2, 4 and 3"
    assert against["engine"] == "theirs"
    assert row["bytes_per_token"] == 10


def test_figures_of_one_repetition() -> None:
    assert Figure.of([Reading(10, 2.0)]) == Figure(5.0, 0.0, (5.0,))
    assert [c.depth for c in cases([1], [], [9, 0], [1])] == [0, 9], "a cache fills in ascending order"


WORKER = """
import json, sys
json.loads(input())
print(json.dumps({"engine": "fake"}), flush=True)
setting = None
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "prepare":
        setting = asked["setting"]
        answer = {"error": "no memory"} if asked["depth"] == 13 else {}
    else:
        fast = setting["type"] == "bf16" and not setting["flash"]
        answer = {"tokens": asked["n"], "seconds": asked["n"] / (50 if fast else 20)}
    print(json.dumps(answer), flush=True)
"""


def test_llama_cpp_gets_its_best_setting(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    case = Case("tg", 32, 64)
    peer = llamacpp.LlamaCpp(sys.executable, tmp_path, 2, 512, [case], worker)
    peer.prepare(case)
    assert peer.measure(case).rate == pytest.approx(50)
    described = peer.describe()
    assert described["setting"] == "bf16 no flash"
    assert len(described["tried"]) == len(llamacpp.SETTINGS)
    with pytest.raises(KvarnError, match="llama-cpp-python: no memory"):
        peer.place(Case("tg", 1, 13), described)
    peer.close()


def test_an_interpreter_without_llama_cpp_is_named(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise ModuleNotFoundError(\"No module named 'llama_cpp'\")")
    with pytest.raises(KvarnError, match="does not have it; name one that does with --against-python"):
        llamacpp.LlamaCpp(sys.executable, tmp_path, 2, 512, [Case("tg", 1)], worker)


class Handler(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that generates at once, and reports 16 tokens of long prompts as cached."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["prompt"]
        if asked["stream"]:
            self.send_response(200)
            self.end_headers()
            for _ in range(asked["max_tokens"]):
                self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            cached = 16 if len(prompt) > 32 else 0
            self.answer({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}, "choices": [{"text": "x"}]})

    def answer(self, body: dict) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_is_measured_beside_kvarn(url: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT)
    assert main(["bench", "-m", str(model), "-p", "8", "-n", "4", "-r", "2", "--against", url, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["against"]["engine"] == url
        assert row["against"]["setting"] == "fake-model"
        assert row["against"]["ratio"] > 0


def test_cached_tokens_of_a_server_do_not_count(url: str) -> None:
    server = Server(url + "/v1/", 256, LONGEST)
    assert server.measure(Case("pp", 8, 0, 2)).tokens == 16
    assert server.measure(Case("pp", 8, 32, 2)).tokens == 2 * (40 - 16)
    assert server.measure(Case("tg", 8, 32, 1)).tokens == 8


def test_a_server_that_refuses_is_quoted(url: str) -> None:
    with pytest.raises(KvarnError, match="is not the URL of a server"):
        Server("ftp://127.0.0.1", 256, LONGEST)


TABLE = {
    "device": cpu_name(),
    "models": {"golden": {size: getattr(GOLDEN, size) for size in SHAPE}},
    "rows": [
        {"engine": engine, "model": "golden", "weights": weights, "test": test, "depth": 0, "batch": 1, "tok_s": speed}
        for engine, weights, test, speed in (
            ("slow 1.0", "F32", "tg", 0.5),
            ("fast 2.0", "F32", "tg", 2),
            ("other type", "Q4_K", "tg", 9),
            ("slow 1.0", "F32", "pp16", 4),
        )
    ],
}


def table(folder: Path, **changes: object) -> Path:
    path = folder / "speeds.json"
    path.write_text(json.dumps(TABLE | changes), encoding="utf-8")
    return path


def test_recorded_speeds_stand_beside_our_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT)
    assert main_type(model) == "F32"
    line = ["bench", "-m", str(model), "-p", "8,16", "-n", "4", "-r", "1", "--against", str(table(tmp_path))]
    assert main([*line, "--json", "--backend", "cpu"]) == 0
    rows = {row["test"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "against" not in rows["pp8"], "the length of a prompt matters"
    assert rows["pp16"]["against"]["engine"] == "slow 1.0"
    against = rows["tg4"]["against"]
    assert (against["engine"], against["tok_s"]) == ("fast 2.0", 2.0)
    assert against["ratio"] == pytest.approx(rows["tg4"]["tok_s"] / 2, rel=1e-2)
    assert main([*line, "--backend", "cpu"]) == 0
    assert "peer: slow 1.0, fast 2.0" in capsys.readouterr().out


UNUSABLE = {
    "another device": ({"device": "Cray-1"}, "measured on 'Cray-1', and this is"),
    "another model": ({"models": {}}, "it has no speeds of a model with n_layers 3, hidden 128"),
    "no rows": ({"rows": {}}, "rows must be a list"),
    "a row without a speed": ({"rows": [TABLE["rows"][0] | {"tok_s": None}]}, "row 0: tok_s is missing"),
    "a speed of 0": ({"rows": [TABLE["rows"][0] | {"tok_s": 0}]}, "row 0: tok_s must be above 0"),
    "a row that is a number": ({"rows": [1]}, "row 0: it is not an object"),
    "models in a list": ({"models": []}, "models must be an object"),
}


@pytest.mark.parametrize(("changes", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_table_of_speeds_that_is_of_no_use(changes: dict, message: str, tmp_path: Path, capsys) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT)
    assert main(["bench", "-m", str(model), "-p", "8", "-n", "0", "--against", str(table(tmp_path, **changes))]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[", "3", "[]", '{"rows": []}', "[" * 100_000])
def test_a_file_that_is_no_table(content: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(KvarnError, match=r"speeds.json: (it is not JSON|a table of speeds has)"):
        Recorded(path, None, "F32", "x")  # type: ignore[arg-type]
    with pytest.raises(KvarnError, match="No such file"):
        Recorded(tmp_path / "none.json", None, "F32", "x")  # type: ignore[arg-type]


def test_the_peers_of_a_gpu_are_in_a_table() -> None:
    path = Path(__file__).parents[2] / "bench/results/peers-h200.json"
    shape = type("Config", (), {"n_layers": 32, "hidden": 4096, "feed_forward": 14336, "vocab_size": 128256})
    speeds = Recorded(path, shape, "BF16", "NVIDIA H200")  # type: ignore[arg-type]
    assert speeds.fastest(Case("tg", 64, 128)) == Speed("llama.cpp, August 2026", 211.0)
    assert speeds.fastest(Case("tg", 64, 1024, 128)) == Speed("vLLM 0.22", 11598.0)
    assert speeds.fastest(Case("tg", 64, 5)) is None
