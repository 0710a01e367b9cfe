"""The request log: one line per request with its facts, never a text or a key, and never a line that a client made."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serve, tiny_model

from kvarn.server.log_lines import Log, LogHandler, as_text
from kvarn.server.log_writer import LogWriter
from kvarn.server.request_log import POLLS

KEY = "alice-and-her-long-key"
ASKED = {"prompt": "tell me a secret", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
HOSTILE = '127.0.0.1 GET /\r\n2026-01-01T00:00:00.000+00:00 127.0.0.1 GET /forged 200 id=1 "\x1b[2J\u202e'


class Logged:
    """A server and its log file."""

    def __init__(self, server: Served, file: Path) -> None:
        self.server = server
        self._file = file

    def line(self, id: str) -> str:
        """The line of this request."""
        found: list[str] = []
        self.server.until(lambda: found.extend(each for each in self.lines() if f"id={id} " in each) or found)
        assert len(found) == 1
        return found[0]

    def lines(self) -> list[str]:
        return self._file.read_text(encoding="ascii").splitlines()

    def ask(self, id: str, path: str, body: Any = None, **headers: str) -> int:
        with contextlib.closing(self.server.connection()) as connection:
            raw = None if body is None else json.dumps(body)
            named = {"X-Request-Id": id} | {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if raw is None else "POST", path, raw, named)
            response = connection.getresponse()
            response.read()
            return response.status


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    folder = tmp_path_factory.mktemp("model")
    flags = ("--alias", "tiny", "--api-key", KEY, "--log-format", "text")
    with serve(tiny_model(folder), *flags, log=folder / "log") as server:
        yield Logged(server, folder / "log")


def facts(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", line))


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_the_facts_and_neither_key_nor_text(logged: Logged, stream: bool) -> None:
    id = f"facts-{stream}"
    assert logged.ask(id, "/v1/completions", ASKED | {"stream": stream}, x_api_key=KEY) == 200
    line = logged.line(id)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d 127\.0\.0\.1 POST /v1/completions 200 ", line)
    found = facts(line)
    assert re.fullmatch("[0-9a-f]{8}", found["key"])
    counts = [found[name] for name in ("model", "prompt_tokens", "output_tokens", "finish")]
    assert counts == ["tiny", "16", "3", "length"]
    assert int(found["cached_tokens"]) in (0, 15)
    assert 0 < float(found["first_token_ms"]) <= float(found["total_ms"])
    assert "error" not in found
    assert KEY not in line
    assert "secret" not in line


def test_a_refusal_is_named_without_the_value(logged: Logged) -> None:
    assert logged.ask("wrong", "/v1/completions", {"prompt": {"my": "secret"}}, Authorization=f"Bearer {KEY}") == 400
    assert facts(logged.line("wrong"))["error"] == '"prompt: it must be a string or an array"'
    assert logged.ask("nobody", "/v1/models", Authorization="Bearer mallory") == 401
    assert "mallory" not in logged.line("nobody")
    assert " 401 id=nobody total_ms=" in logged.line("nobody")


def test_a_client_that_leaves(logged: Logged) -> None:
    body = ASKED | {"max_tokens": 1900, "stream": True}
    with contextlib.closing(logged.server.connection()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"x-api-key": KEY, "X-Request-Id": "left"})
        with connection.getresponse() as response:
            response.readline()
    found = facts(logged.line("left"))
    assert found["finish"] == "cancelled"
    assert 1 <= int(found["output_tokens"]) < 1900


def test_polls_are_not_logged_unless_they_fail(logged: Logged) -> None:
    for path in (*POLLS, f"{POLLS[0]}/"):
        assert logged.ask("poll", path) == 200
    assert logged.ask("after", "/none") == 404
    logged.line("after")
    assert not [line for line in logged.lines() if "id=poll" in line]


def test_no_client_can_forge_a_line(logged: Logged) -> None:
    before = len(logged.lines())
    quoted = HOSTILE.encode()
    path = "/" + "".join(f"%{byte:02x}" for byte in quoted) + "x" * 5000
    with contextlib.closing(logged.server.connection()) as connection:
        for name in ("X-Forwarded-For", "X-Request-Id", "User-Agent"):
            connection.putrequest("GET", path)
            connection.putheader(name, HOSTILE.replace("\r\n", "\x0b").encode("utf-8"))
            connection.endheaders()
            response = connection.getresponse()
            response.read()
            assert response.status in (400, 404)
            if response.status == 400:
                connection.close()
    assert logged.ask("last=1", "/none") == 404
    logged.server.until(lambda: any("last=1" in line for line in logged.lines()))
    new = logged.lines()[before:]
    assert len(new) == 4
    for line in new:
        assert len(line) < 4096, "a pipe takes it whole"
        assert re.match(r"2\d\d\d-\S+ \S+ (GET|-) \S+", line)
        assert line.isprintable()
        assert "/forged 200 id=1" not in re.sub(r'"(\\.|[^"\\])*"', "", line), "only inside quotes"


def test_stopping_and_totals(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--log-format", "json", "--log-texts", "--log-polls", "--drain-seconds", "50")
    with serve(tiny_model(tmp_path), *flags, log=log) as server:
        server.ask("/health")
        with server.start(ASKED | {"max_tokens": 300}) as answer:
            server.stop()
            assert b"[DONE]" in answer.response.read()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "request", "stopping", "request", "stopped"]
    started, poll, stopping, request, stopped = lines
    assert started["address"] == f"{server.url}/v1"
    assert (poll["path"], poll["status"]) == ("/health", 200)
    assert (stopping["open_requests"], request["output_tokens"]) == (1, 300)
    assert stopping["message"] == "stopping: 1 request may finish within 50 s"
    assert request["prompt"] == [ASKED["prompt"]]
    assert len(request["answer"][0]) > 100
    totals = [stopped[name] for name in ("requests", "refused", "failed", "cancelled", "output_tokens")]
    assert totals == [2, 0, 0, 0, 300]


def test_a_closed_standard_error_stops_nothing(tmp_path: Path) -> None:
    with serve(tiny_model(tmp_path), "--log-format", "text") as server:
        server.process.stderr.close()
        assert [server.ask("/v1/completions", ASKED).status for _ in range(3)] == [200] * 3
        assert server.stop() == 0


# -- the writer, without a server --------------------------------------------------------------------------------


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        for fd in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(fd)


def read_lines(fd: int) -> list[str]:
    """Until all writers have closed it."""
    with os.fdopen(os.dup(fd), "r") as opened:
        return opened.read().splitlines()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_pipe_drops_lines_and_says_so(blocking: bool) -> None:
    with pipe() as (reading, writing):
        os.set_blocking(writing, blocking)
        writer = LogWriter(writing, lambda n: f"{n} dropped", most=10)
        for i in range(1000):  # far more than a pipe holds: nobody reads, and no call waits
            writer.put(f"{i} {'x' * 1000}")
        dropped = writer.dropped
        assert dropped > 500
        os.close(writing)
        got = b""
        while b" dropped\n" not in got:  # makes room, so the writer goes on
            got += os.read(reading, 65536)
        writer.put("last")
        writer.close()
        lines = [*got.decode().splitlines(), *read_lines(reading)]
        assert f"{dropped} dropped" in lines
        assert lines[-1] == "last"
        assert len(lines) == 1000 - dropped + 2, "every line came, or was counted"


def test_a_closed_pipe_counts_and_never_raises() -> None:
    with pipe() as (reading, writing):
        writer = LogWriter(writing, str)
        os.close(reading)
        for _ in range(5):
            writer.put("x")
        writer.close()
        assert writer.dropped == 5
        writer.put("after the end")
        assert writer.dropped == 6


def test_errors_of_the_engine_are_json_too() -> None:
    with pipe() as (reading, writing):
        log = Log(writing, "json")
        logger = logging.Logger("kvarn")
        logger.addHandler(LogHandler(log))
        logger.info("not for this log")
        logger.error("the engine has failed: %s", "a\nb")
        try:
            raise MemoryError("gone")
        except MemoryError:
            logger.exception("a request failed")
        log.close()
        os.close(writing)
        first, second = map(json.loads, read_lines(reading))
    assert (first["event"], first["message"]) == ("error", "the engine has failed: a\nb")
    assert second["message"] == "a request failed: MemoryError: gone"
    assert "test_request_log.py" in second["traceback"]
    assert as_text(first).endswith(" kvarn: the engine has failed: a\\nb")
