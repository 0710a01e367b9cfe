"""Snapshots over HTTP: kept by name, restored after a restart, and only ever seen by the key that made them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serve, tiny_model

SYSTEM = {"role": "system", "content": "you are very nice " * 6}
ASK = {"messages": [SYSTEM, {"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 3}
HERE = "/kvarn/snapshots"


def ask(server: Served, method: str, path: str, body: Any = None, key: str = "alice") -> tuple[int, Any]:
    with contextlib.closing(server.connection()) as connection:
        raw = json.dumps(body) if body is not None else None
        connection.request(method, path, raw, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture(scope="module")
def flags(model: Path) -> tuple[str, ...]:
    return ("--api-key", "alice", "--api-key", "bob", "--snapshot-dir", f"{model.parent / 'snaps'}:20M")


@pytest.fixture(scope="module")
def plain(model: Path, flags: tuple[str, ...]) -> Iterator[Any]:
    """A server that makes a snapshot, and its answer without one."""
    with serve(model, *flags) as server:
        answer = ask(server, "POST", "/v1/chat/completions", ASK)[1]
        status, made = ask(server, "POST", HERE, {"name": "rules", "messages": [SYSTEM]})
        assert status == 200, made
        assert made["object"] == "snapshot"
        yield server, answer, made


def test_after_a_restart_a_snapshot_gives_the_same_answer_and_says_so(model, flags, plain, tmp_path) -> None:
    _, answer, made = plain
    file = next((model.parent / "snaps").glob("*/rules.kvs"))
    with serve(model, *flags) as server:
        assert ask(server, "POST", f"{HERE}/rules/load", key="bob")[0] == 404
        status, found = ask(server, "POST", f"{HERE}/rules/load")
        assert (status, found["tokens"], found["bytes"]) == (200, made["tokens"], made["bytes"])
        again = ask(server, "POST", "/v1/chat/completions", ASK)[1]
        assert again["choices"] == answer["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"]
        told = ask(server, "GET", "/kvarn/requests")[1]["data"][0]
        assert told["snapshot"]["name"] == "rules"
        assert told["snapshot"]["tokens"] == made["tokens"]
        assert (
            ask(server, "POST", "/v1/chat/completions", ASK, key="bob")[1]["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
            < 5
        )  # another key has no part in it
        raw = file.read_bytes()
        try:
            file.write_bytes(raw[:-3] + b"abc")
            status, refused = ask(server, "POST", f"{HERE}/rules/load")
            assert status == 409
            assert "damaged" in refused["error"]["message"]
        finally:
            file.write_bytes(raw)
    with serve(model, "--api-key", "alice", "--api-key", "bob", "--snapshot", str(file)) as server:
        for key in ("alice", "bob"):  # the administrator's snapshot is for every key
            again = ask(server, "POST", "/v1/chat/completions", ASK, key=key)[1]
            assert again["choices"] == answer["choices"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"]
        status, refused = ask(server, "GET", HERE)
        assert (status, "--snapshot-dir" in refused["error"]["message"]) == (404, True)


def test_a_key_lists_reads_and_deletes_its_own(plain) -> None:
    server, _, made = plain
    assert ask(server, "POST", HERE, {"name": "two", "prompt": "hello there"})[0] == 200
    assert [each["name"] for each in ask(server, "GET", HERE)[1]["data"]] == ["rules", "two"]
    assert ask(server, "GET", f"{HERE}/rules")[1] == made
    for method, path in (("GET", f"{HERE}/two"), ("DELETE", f"{HERE}/two"), ("POST", f"{HERE}/two/load")):
        assert ask(server, method, path, key="bob")[0] == 404
    assert ask(server, "GET", HERE, key="bob")[1]["data"] == []
    assert ask(server, "DELETE", f"{HERE}/two")[1]["deleted"]
    assert ask(server, "DELETE", f"{HERE}/two")[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x"}, 400),
        ({"name": "x"}, 400),
        ({"name": "x", "prompt": "x", "messages": [SYSTEM]}, 400),
        ({"name": "../x", "prompt": "x"}, 400),
        ({"name": "x" * 65, "prompt": "x"}, 400),
        ({"name": 3, "prompt": "x"}, 400),
        ({"name": "x", "prompt": "x", "path": "/etc"}, 400),
        ({"name": "x", "prompt": "x " * 600}, 400),
    ],
)
def test_wrong_bodies_are_refused_in_one_line(plain, body: Any, status: int) -> None:
    found, answer = ask(plain[0], "POST", HERE, body)
    assert found == status
    assert "\n" not in answer["error"]["message"]
    assert ask(plain[0], "GET", HERE + "/..%2f..%2fetc")[0] in (400, 404)
    assert ask(plain[0], "GET", HERE, key="nobody")[0] == 401
