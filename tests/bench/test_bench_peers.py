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
from kvarn.bench.machine import Bandwidth
from kvarn.bench.peers import llamacpp
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
