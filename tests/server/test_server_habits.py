"""What clients of other servers expect: addresses, keys, model names, usage in chunks, a fingerprint of the answers."""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_gguf
from support.serving import Reply, Served, serve, tiny_model
from support.tiny_models import GOLDEN

from kvarn import LLM, arithmetic, native
from kvarn.cli import main
from kvarn.server.fingerprint import fingerprint_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
# The digest of golden/bits.json, by arithmetic version.
BITS = {
    1: "1cbd6d6d3196b028",
    2: "10fc0bf804fd03ff",
    3: "8c482faa89ccf8b9",
    4: "a98f1c8bcbf5e3a3",
    5: "b4e03d514a55245b",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--alias", "tiny", "--api-key", "alice", "--api-key", "bob")
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 256), *flags) as served:
        yield served


def ask(server: Served, path: str, body: dict | None = None, method: str = "", **headers: str) -> Reply:
    with contextlib.closing(server.connection()) as connection:
        raw = json.dumps(body) if body is not None else None
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, given)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def test_addresses_in_every_spelling(server: Served) -> None:
    for path, body in ((TEXT, SHORT), (CHAT, TALK), ("/v1/models", None), ("/v1/models/tiny", None)):
        expected = ask(server, path, body, x_api_key="alice").json
        for spelling in (f"{path}/", path.removeprefix("/v1"), f"{path.removeprefix('/v1')}/"):
            reply = ask(server, spelling, body, x_api_key="alice")
            assert (reply.status, reply.json["object"]) == (200, expected["object"]), spelling
            assert reply.json.get("choices") == expected.get("choices")
    assert ask(server, "/health/").status == ask(server, "/openapi.json/").status == 200


def test_the_root_lists_the_endpoints(server: Served) -> None:
    for path in ("/", "/v1", "/v1/"):
        found = ask(server, path).json
        assert (found["name"], found["base_url"]) == ("kvarn", "/v1")
        assert {"POST /v1/chat/completions", "GET /v1/models", "GET /metrics"} <= found["endpoints"].keys()
    assert "tiny" not in json.dumps(found), "the model's name needs a key"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/kvarn/cache"])
def test_head_where_get_works(server: Served, path: str) -> None:
    head, get = (ask(server, path, method=method, x_api_key="alice") for method in ("HEAD", "GET"))
    assert (head.status, head.body, get.status) == (200, b"", 200)
    assert head.headers["content-type"] == get.headers["content-type"]
    assert ask(server, "/none", method="HEAD").status == 404


def test_a_key_in_either_header(server: Served) -> None:
    def status(**headers: str) -> int:
        return ask(server, "/v1/models", **headers).status

    assert status(x_api_key="alice") == status(Authorization="Bearer bob") == status(X_API_Key=" bob ") == 200
    assert status(x_api_key="alice", Authorization="Bearer alice") == 200
    assert status(x_api_key="alice", Authorization="Basic cHJveHk6eA==") == 200, "which is for a proxy"
    assert status(x_api_key="mallory") == status(x_api_key="") == status() == 401
    both = ask(server, "/v1/models", x_api_key="alice", Authorization="Bearer bob")
    assert (both.status, both.error) == (401, "Authorization and x-api-key have different keys: give one")
    assert ask(server, "/v1/models", x_api_key="alice", Authorization="Bearer mallory").status == 401


def test_any_model_name_is_answered_by_the_real_model(server: Served) -> None:
    for path, body in ((TEXT, SHORT), (CHAT, TALK), ("/tokenize", {"prompt": "a"})):
        reply = ask(server, path, body | {"model": "gpt-4o"}, x_api_key="alice")
        assert (reply.status, reply.json.get("model", "tiny")) == (200, "tiny")
    assert ask(server, "/v1/models/gpt-4o", x_api_key="alice").status == 404


def test_an_empty_alias_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "--alias", ""]) == 1
    assert capsys.readouterr().err.startswith("kvarn serve: --alias is empty")


def test_created_is_the_start_of_the_server(server: Served) -> None:
    (model,) = ask(server, "/v1/models", x_api_key="alice").json["data"]
    assert time.time() - 600 < model["created"] <= time.time()
    assert model == ask(server, "/v1/models/tiny", x_api_key="alice").json


def test_usage_in_every_chunk(server: Served) -> None:
    for path, body in ((TEXT, SHORT | {"logprobs": 0}), (CHAT, TALK | {"logprobs": True})):
        body = body | {"max_tokens": 6, "n": 2, "stream": True, "ignore_eos": True}
        for options in ({"include_usage": True, "continuous_usage_stats": True}, {"continuous_usage_stats": True}):
            events = ask(server, path, body | {"stream_options": options}, x_api_key="alice").events
            seen = 0
            for event in events:
                logprobs = [choice["logprobs"] for choice in event["choices"] if choice["logprobs"]]
                seen += sum(len(each.get("tokens", each.get("content"))) for each in logprobs)
                usage, prompt = event["usage"], events[-1]["kvarn"]["prompt_tokens"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, seen)
                assert usage["total_tokens"] == prompt + seen
            assert seen == 12
            assert bool(events[-1]["choices"]) != ("include_usage" in options)
    events = ask(server, TEXT, SHORT | {"stream": True}, x_api_key="alice").events
    assert not any("usage" in event for event in events)


def test_no_limit_fills_the_context(server: Served) -> None:
    body = SHORT | {"max_tokens": -1, "ignore_eos": True}
    usage = ask(server, TEXT, body, x_api_key="alice").json["usage"]
    assert usage["total_tokens"] == 256
    del body["max_tokens"]
    assert ask(server, TEXT, body, x_api_key="alice").json["usage"]["completion_tokens"] == 16


# -- the fingerprint ---------------------------------------------------------------------------------------------


def test_every_answer_and_chunk_has_the_fingerprint(server: Served) -> None:
    whole = ask(server, TEXT, SHORT, x_api_key="alice").json["system_fingerprint"]
    order = native.sum_order()
    assert re.fullmatch(rf"bits-kvarn-[\d.]+-cpu-{order}-bf16-a{arithmetic.VERSION}-[0-9a-f]{{8}}", whole)
    for path, body in ((TEXT, SHORT), (CHAT, TALK)):
        events = ask(server, path, body | {"stream": True}, x_api_key="alice").events
        assert {event["system_fingerprint"] for event in events} == {whole}


def test_the_fingerprint_changes_with_what_changes_bits_and_with_nothing_else(tmp_path: Path) -> None:
    size = replace(GOLDEN, context=256)
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.CHAT, size)
    other = tiny_gguf.write(tmp_path / "b.gguf", "llama", tiny_gguf.CHAT.replace("assistant", "Assistant"), size)
    raw = bytearray(path.read_bytes())
    raw[-3000] ^= 1  # a bit of a weight
    (tmp_path / "c.gguf").write_bytes(raw)

    def of(model: Path = path, **settings: object) -> str:
        with LLM(model, context=128, max_seqs=2, **settings) as llm:
            return fingerprint_of(llm)

    plain = of()
    (tmp_path / "renamed.gguf").write_bytes(path.read_bytes())
    for same in (of(), of(threads=2), of(cache="paged"), of(tmp_path / "renamed.gguf"), of(max_batch_tokens=64)):
        assert same == plain
    changed = {
        of(cache_type="f32"),
        of(backend="reference"),
        of(cache="sliding", window=32),
        of(cache="sinks", window=32, pinned=4),
        of(trust_messages=True),
        of(other),
        of(tmp_path / "c.gguf"),
    }
    assert len(changed) == 7
    assert plain not in changed


def test_the_arithmetic_version_belongs_to_the_golden_bits() -> None:
    """If bits.json changes because bits of answers change: raise arithmetic.VERSION, and add its digest here. If it
    only has new cases: replace the digest."""
    golden = (Path(__file__).parents[1] / "golden" / "bits.json").read_bytes()
    assert BITS[arithmetic.VERSION] == hashlib.sha256(golden).hexdigest()[:16]
