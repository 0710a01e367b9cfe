"""A model whose weights are NaN: every request gets an error that says so, and NaN is in no JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.serving import Served, serve

from kvarn.cli import main


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "nan.gguf"
    return tiny_gguf.write(path, "llama", tiny_gguf.CHAT, draw=lambda shape: np.full(shape, np.nan, np.float32))


@pytest.fixture(scope="module")
def server(damaged: Path) -> Iterator[Served]:
    with serve(damaged) as served:
        yield served


@pytest.mark.parametrize("settings", [{}, {"logprobs": 2}, {"temperature": 0}, {"n": 3}])
def test_a_request_fails_by_name(server: Served, settings: dict) -> None:
    body = {"prompt": "ab", "max_tokens": 3, **settings}
    reply = server.ask("/v1/completions", body)
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert "BadLogits" in reply.error
    stream = server.ask("/v1/completions", body | {"stream": True})
    events = [line[6:] for line in stream.body.decode().splitlines() if line.startswith("data: {")]
    assert "BadLogits" in json.loads(events[-1], parse_constant=pytest.fail)["error"]["message"]
    assert b"NaN" not in stream.body + reply.body
    server.until_idle()
    assert server.cache()["sequences"] == 0, "nothing is held"
    json.loads(server.ask("/kvarn/requests").body, parse_constant=pytest.fail)


def test_the_commands_say_so(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("ab cd ef " * 40)
    assert main(["run", "-m", str(damaged), "-p", "ab", "-n", "3", "--json"]) == 1
    assert "its weights are damaged" in capsys.readouterr().err
    assert main(["perplexity", "-m", str(damaged), "-f", str(text), "-c", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ppl"] is None
