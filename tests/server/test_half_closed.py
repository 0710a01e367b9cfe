"""Clients that close their sending side and read on, and clients that have gone, which look alike at first."""

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest
from support.serving import Served, closed, serve, tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COMPLETION = {"prompt": "abcdefgh" * 8, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
DEEP = COMPLETION | {"max_tokens": 16000}  # seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 16384), "-c", "16384", "-np", "1") as served:
        yield served
        served.until_idle()
        assert served.cache()["sequences"] == 0
        assert served.stop() == 0
        assert served.process.stderr.read() == ""


def request(path: str, body: dict, version: str = "1.1") -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def half_closed(server: Served, sent: bytes) -> socket.socket:
    connection = server.raw(sent)
    connection.shutdown(socket.SHUT_WR)
    return connection


def final(answer: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer, after any interim ones."""
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(("path", "body"), [(TEXT, COMPLETION), (CHAT, TALK)])
def test_a_stream_and_a_whole_answer_arrive(server: Served, path: str, body: dict, version: str) -> None:
    expected = server.ask(path, body).json["choices"]
    for stream in (False, True):
        connection = server.raw(request(path, body | {"stream": stream}, version))
        if version == "1.0":  # it may close its side once the answer has begun
            assert connection.recv(1, socket.MSG_PEEK)
        connection.shutdown(socket.SHUT_WR)
        status, answer = final(closed(connection))
        assert status == 200
        if stream:
            assert answer.rstrip().endswith(b"0" if version == "1.1" else b"data: [DONE]")
            assert b"data: [DONE]" in answer
        else:
            assert json.loads(answer)["choices"] == expected


def test_a_client_that_waits_long_is_probed_with_interim_answers(server: Served) -> None:
    with server.start(DEEP):
        connection = half_closed(server, request(TEXT, COMPLETION))
        server.until(lambda: server.metric("kvarn:num_requests_waiting") == 1)
        connection.settimeout(60)
        interim = connection.recv(4096)
        assert interim.startswith(b"HTTP/1.1 100 ")
    status, answer = final(closed(connection))
    assert (status, len(json.loads(answer)["choices"])) == (200, 1)


def test_pipelined_requests_are_all_answered(server: Served) -> None:
    one = request(TEXT, COMPLETION | {"max_tokens": 3})
    answer = closed(half_closed(server, one + one + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.endswith(b'{"status":"ok"}')


def test_half_a_request_after_a_whole_one_is_no_request(server: Served) -> None:
    one = request(TEXT, COMPLETION)
    for half in (one[:20], one[:-5]):
        assert closed(half_closed(server, one + half)).count(b"HTTP/1.1 200") == 1


def test_half_a_request_is_no_request(server: Served) -> None:
    for sent in (b"", b"GET /hea", request(TEXT, COMPLETION)[:-5]):
        assert closed(half_closed(server, sent)) == b""


@pytest.mark.parametrize("half_closes_first", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_has_gone_is_noticed(server: Served, stream: bool, half_closes_first: bool, queued: bool) -> None:
    with server.start(DEEP) if queued else contextlib.nullcontext():
        before = server.metric("kvarn:request_success_total", finished_reason="abort")
        connection = server.raw(request(TEXT, DEEP | {"stream": stream}))
        server.until(lambda: server.metric("kvarn:num_requests_running") == 1)
        server.until(lambda: server.metric("kvarn:num_requests_waiting") == int(queued))
        if half_closes_first:
            connection.shutdown(socket.SHUT_WR)
            if not stream:
                assert connection.recv(25)
        connection.close()
        server.until(lambda: server.metric("kvarn:request_success_total", finished_reason="abort") == before + 1)
    server.until_idle()
    assert server.cache()["blocks"]["used"] == 0
