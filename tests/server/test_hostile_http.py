"""Requests that are not quite HTTP and bodies that are not quite requests: a fixed part of `make attack`."""

import contextlib
import json
import socket
from collections.abc import Iterator
from itertools import islice

import pytest
from support.hostile_http import ODDITIES, VALID, hostile_bodies, message_of, said, statuses
from support.serving import Served, closed, serve, tiny_model

from kvarn.server.schema import show


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    with serve(tiny_model(folder, 256), "--log-format", "json", log=folder / "log") as served:
        yield served
        served.until_idle()
        assert served.cache()["blocks"]["used"] == 0
        assert served.stop() == 0
    lines = [json.loads(line) for line in (folder / "log").read_text(encoding="ascii").splitlines()]
    assert {line["event"] for line in lines} == {"started", "request", "stopping", "stopped"}, "and no warning"
    asked = [line for line in lines if line["event"] == "request"]
    assert {line["client"] for line in asked} == {"127.0.0.1"}
    assert all(line["status"] in (200, 499) or line["error"] for line in asked)
    assert lines[-1]["requests"] == len(asked)


@pytest.mark.parametrize("name", ODDITIES)
def test_raw_http(server: Served, name: str) -> None:
    sent, expected = ODDITIES[name]
    connection = server.raw(sent)
    connection.shutdown(socket.SHUT_WR)
    received = closed(connection)
    assert statuses(received) == expected, received
    if expected[-1:] == [400]:
        assert json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert server.ask("/health").status == 200


def test_rubbish_after_an_early_answer_closes_the_connection(server: Served) -> None:
    """The answer came before the body, and the body is not HTTP: there is nothing more to answer."""
    connection = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    answer = b""
    while b"ok" not in answer:
        answer += connection.recv(65536)
    connection.sendall(b"zz\r\n")
    assert statuses(answer + closed(connection)) == [200]


@pytest.mark.parametrize("path", VALID)
def test_every_fifth_hostile_body(server: Served, path: str) -> None:
    expected = said(server.ask(path, VALID[path]).json)
    with contextlib.closing(server.connection()) as connection:
        for body in islice(hostile_bodies(path), 0, None, 5):
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = response.read()
            assert response.status in (200, 400, 404), show(body)
            if response.status != 200:
                message = message_of(json.loads(answer))
                assert len(message) < 300
                assert "\n" not in message
    assert said(server.ask(path, VALID[path]).json) == expected
