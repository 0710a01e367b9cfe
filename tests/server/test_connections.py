"""Connections that send nothing, half a request, or too slowly; more connections than the server may have."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Served, closed, serve, tiny_model

DEEP = {"prompt": "abcdefgh" * 6, "max_tokens": 16000, "temperature": 0, "ignore_eos": True}  # seconds
SHORT = {"prompt": "something short", "max_tokens": 4, "temperature": 0}
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 16384)


@pytest.fixture(scope="module")
def strict(model: Path) -> Iterator[Served]:
    with serve(model, "--api-key", "k", "--head-seconds", "0.2") as served:
        yield served
        assert served.stop() == 0
        assert served.process.stderr.read() == ""


def closed_while_dripping(connection: socket.socket) -> bytes:
    """Send a byte again and again until the server closes; returns what it had sent."""
    connection.settimeout(0.01)
    received = b""
    with connection:
        for _ in range(6000):
            try:
                connection.sendall(b"x")
                piece = connection.recv(65536)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return received
            received += piece
            if not piece:
                return received
    raise AssertionError("it was not closed within a minute")


@pytest.mark.parametrize("sent", [b"", b"G", HALF, b"POST /v1/completions HTTP/1.1\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(strict: Served, sent: bytes) -> None:
    assert closed(strict.raw(sent)) == b""


def test_a_head_that_comes_byte_by_byte_ends_it_too(strict: Served) -> None:
    assert closed_while_dripping(strict.raw(HALF)) == b""


def test_the_next_head_has_the_same_time(strict: Served) -> None:
    answer = closed_while_dripping(strict.raw(HEALTH + HALF))
    assert answer.count(b"HTTP/1.1 200") == 1


def test_a_body_that_nobody_waits_for_has_the_same_time(strict: Served) -> None:
    for head, status in ((b"GET /health", b"200"), (b"POST /v1/completions", b"401")):
        sent = head + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        answer = closed_while_dripping(strict.raw(sent))
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert answer.count(b"HTTP/1.1") == 1


def test_an_idle_connection_may_stay(strict: Served) -> None:
    connection = strict.connection()
    for _ in range(3):
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b'{"status":"ok"}')
        assert closed(strict.raw()) == b"", "another connection, opened later, that sent nothing"
    connection.close()


def test_a_prompt_client_gets_in_where_all_others_are_silent(model: Path) -> None:
    with serve(model, "--max-connections", "4", "--head-seconds", "600") as server, contextlib.ExitStack() as stay:
        silent = [server.raw() for _ in range(3)] + [server.raw(HALF)]
        for connection in silent:
            prompt = stay.enter_context(server.post(SHORT))
            assert prompt.response.status == 200
            assert prompt.response.read()
            assert closed(connection) == b"", "the oldest was closed"


def test_when_all_are_busy_a_new_connection_is_refused(model: Path) -> None:
    flags = ("-c", "16384", "--max-connections", "2")
    with serve(model, *flags) as server, server.start(DEEP) as first:
        with server.start(DEEP) as second:
            reply = server.ask("/health")
            assert (reply.status, reply.headers["retry-after"], reply.headers["connection"]) == (503, "1", "close")
            assert reply.error == "every connection of this server is in use: try again later"
            assert reply.json["error"]["type"] == "server_error"
            refused = closed(server.raw(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10000000\r\n\r\n"))
            assert refused.startswith(b"HTTP/1.1 503"), "also where it sends more than the server reads"
            assert first.response.readline()
            assert second.response.readline()
        server.until(lambda: server.ask("/health").status == 200)
        assert first.response.readline()


def test_an_address_cannot_take_all_connections(model: Path) -> None:
    flags = ("-c", "16384", "--max-connections-per-address", "1")
    with serve(model, *flags) as server, server.start(DEEP):
        assert closed(server.raw(HEALTH)).startswith(b"HTTP/1.1 503")
        with server.raw(HEALTH, source="127.0.0.2") as other:
            assert other.recv(65536).startswith(b"HTTP/1.1 200")


def test_more_silent_connections_than_files(model: Path) -> None:
    """At the limit of open files nobody else got in, and the log grew by a megabyte a second."""
    with serve(model, "--api-key", "k", files=256) as server, contextlib.ExitStack() as silent:
        for i in range(1100):
            silent.enter_context(server.raw(HALF if i % 2 else b""))
            if i % 100 == 99:
                assert server.ask("/v1/completions", SHORT, "k").status == 200
        assert server.stop() == 0
        assert server.process.stderr.read() == ""


def test_limits_that_cannot_be_kept_are_refused(model: Path, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    for flags, message in (
        (("--max-connections", "0"), "--max-connections is 0; it must be at least 1"),
        (("--max-connections", "100000"), "raise the limit (ulimit -n) or lower the flag"),
        (("--max-connections-per-address", "0"), "--max-connections-per-address is 0; it must be at least 1"),
        (("--head-seconds", "0"), "--head-seconds is 0.0; it must be at least 0.1"),
        (("--head-seconds", "nan"), "--head-seconds is nan; it must be at least 0.1"),
    ):
        assert main(["serve", "-m", str(model), "--port", "0", *flags]) == 1
        assert message in capsys.readouterr().err
