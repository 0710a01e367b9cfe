"""x-request-id: every answer has one, a client's own is kept if it is sane, and it finds the explanation."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import Reply, Served, closed, serve, tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
KEYS = ("--api-key", "alice", "--api-key", "bob")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 256), *KEYS, "--alias", "tiny") as served:
        yield served


def ask(server: Served, path: str, body: Any = None, method: str = "", **headers: str) -> Reply:
    with contextlib.closing(server.connection()) as connection:
        raw = json.dumps(body) if body is not None else None
        given = {"x-api-key": "alice"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, given)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/v1/models", None, "GET", 200),
        ("/health", None, "HEAD", 200),
        ("/none", None, "GET", 404),
        (TEXT, None, "GET", 405),
        (TEXT, SHORT, "POST", 200),
        (TEXT, SHORT | {"stream": True}, "POST", 200),
        (TEXT, SHORT | {"n": 0}, "POST", 400),
        (TEXT, {"prompt": "a" * 9_000_000}, "POST", 413),
    ],
)
def test_every_answer_has_an_id(server: Served, path: str, body: Any, method: str, status: int) -> None:
    new = ask(server, path, body, method)
    assert (new.status, bool(re.fullmatch("[0-9a-f]{32}", new.headers["x-request-id"]))) == (status, True)
    own = ask(server, path, body, method, X_Request_Id="my-id/7 of 9")
    assert (own.status, own.headers["x-request-id"]) == (status, "my-id/7 of 9")


def test_refusals_outside_the_application_have_one_too(server: Served) -> None:
    refused = closed(server.raw(b"this is not HTTP\r\n\r\n"))
    assert refused.startswith(b"HTTP/1.1 400")
    assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", refused)
    assert ask(server, TEXT, SHORT, x_api_key="mallory").headers["x-request-id"]


@pytest.mark.parametrize("id", ["", "x" * 129, "caf\xe9", "a\tb", "a\x7fb"])
def test_an_id_that_is_not_sane_is_replaced(server: Served, id: str) -> None:
    reply = ask(server, "/v1/models", X_Request_Id=id)
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


def test_the_id_finds_the_explanation_of_its_key_only(server: Served) -> None:
    first = ask(server, TEXT, SHORT, X_Request_Id="a b/c")
    assert ask(server, "/kvarn/requests/a%20b%2Fc").json == first.json["kvarn"]
    assert first.json["kvarn"]["request_id"] == "a b/c"
    assert ask(server, f"/kvarn/requests/{first.json['id']}").json == first.json["kvarn"]
    assert ask(server, "/kvarn/requests/a%20b%2Fc", x_api_key="bob").status == 404
    bobs = ask(server, TEXT, SHORT, X_Request_Id="a b/c", x_api_key="bob").json["kvarn"]
    assert ask(server, "/kvarn/requests/a%20b%2Fc", x_api_key="bob").json == bobs
    assert ask(server, "/kvarn/requests/a%20b%2Fc").json == first.json["kvarn"], "bob's record hides nothing"
    again = ask(server, TEXT, SHORT, X_Request_Id="a b/c").json["kvarn"]
    assert ask(server, "/kvarn/requests/a%20b%2Fc").json == again != first.json["kvarn"]


def test_vllms_field_names_a_request_without_the_header(server: Served) -> None:
    body = SHORT | {"request_id": "from the body"}
    assert ask(server, TEXT, body).headers["x-request-id"] == "from the body"
    assert ask(server, "/kvarn/requests/from%20the%20body").json["request_id"] == "from the body"
    assert ask(server, TEXT, body, X_Request_Id="head").headers["x-request-id"] == "head"


def test_web_pages_may_read_it(server: Served) -> None:
    reply = ask(server, "/v1/models", Origin="http://localhost:3000")
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
