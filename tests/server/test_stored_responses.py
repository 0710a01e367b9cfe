"""Stored responses: who can read them, and how the next response continues their tokens."""

import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from support.responses import PATH, TEXTS, WEATHER, answer, text_of
from support.scripted import (
    HERMES,
    HERMES_CONTROL,
    MISTRAL,
    MISTRAL_CONTROL,
    Client,
    scripted_llm,
    scripted_model,
    serving,
)

from kvarn.server.access import Access
from kvarn.server.protocols.responses.store import Responses, Stored


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS)) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS), Access(["alice", "bob"])) as client:
        yield client


def test_a_stored_response_can_be_read_and_deleted(keyed: Client) -> None:
    items = [{"role": "user", "content": f"line {i}"} for i in range(3)] + [{"role": "user", "content": "play text"}]
    made = keyed.ask(PATH, key="alice", input=items, temperature=0).json
    where = f"{PATH}/{made['id']}"
    assert keyed.get(where, key="alice").json == made
    listed = keyed.get(f"{where}/input_items", key="alice").json
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert (texts, listed["has_more"]) == (["play text", "line 2", "line 1", "line 0"], False)
    page = keyed.get(f"{where}/input_items?order=asc&limit=2", key="alice").json
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, *(item["id"] for item in page["data"]))
    rest = keyed.get(f"{where}/input_items?order=asc&after={page['last_id']}", key="alice").json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["line 2", "play text"]
    for query in ("limit=0", "limit=x", "order=up", "after=x"):
        assert keyed.get(f"{where}/input_items?{query}", key="alice").status == 400
    assert keyed.get(f"{where}?stream=true", key="alice").status == 400
    deleted = keyed.delete(where, key="alice").json
    assert deleted == {"id": made["id"], "object": "response", "deleted": True}
    assert keyed.get(where, key="alice").status == 404
    assert keyed.delete(where, key="alice").status == 404


def test_a_stored_response_belongs_to_its_key(keyed: Client) -> None:
    made = keyed.ask(PATH, key="alice", input="play text", temperature=0).json
    where = f"{PATH}/{made['id']}"
    for path in (where, f"{where}/input_items", f"/kvarn/requests/{made['id']}"):
        assert keyed.get(path, key="bob").status == 404
        assert keyed.get(path, key="alice").status == 200
        assert keyed.get(path).status == 401
    assert keyed.delete(where, key="bob").status == 404
    stolen = keyed.ask(PATH, key="bob", input="play text", previous_response_id=made["id"])
    assert (stolen.status, stolen.json["error"]["code"]) == (404, "previous_response_not_found")
    assert "sunny" not in json.dumps(keyed.get("/kvarn/requests", key="bob").json)


def test_without_keys_records_do_not_show_the_id_that_reads_a_response(client: Client) -> None:
    made = client.ask(PATH, input="play text", temperature=0).json
    assert made["id"] not in json.dumps(client.get("/kvarn/requests").json)
    assert client.get(f"/kvarn/requests/{made['id']}").json["id"] == f"{made['id'][:12]}..."


def test_records_do_not_name_the_response_that_was_continued(client: Client) -> None:
    """An id in a record would let who reads the record read the response."""
    first = client.ask(PATH, input="play text", temperature=0).json
    second = client.ask(PATH, input="play text", temperature=0, previous_response_id=first["id"]).json
    assert second["kvarn"]["continued"]["id"] == first["id"]
    assert first["id"] not in json.dumps(client.get("/kvarn/requests").json)
    assert "continued" not in client.get(f"/kvarn/requests/{second['id']}").json


def test_not_stored(client: Client) -> None:
    made = client.ask(PATH, input="play text", temperature=0, store=False).json
    assert made["store"] is False
    assert client.get(f"{PATH}/{made['id']}").status == 404
    assert client.ask(PATH, input="play text", previous_response_id=made["id"]).status == 404
    left = client.ask(PATH, leave_at=3, input="play long", temperature=0, stream=True)
    begun = json.loads(left.body.decode().split("data: ")[1].split("\n")[0])
    assert client.get(f"{PATH}/{begun['response']['id']}").status == 404


def follow(client: Client, first: dict, given: object, **fields: Any) -> dict:
    whole = answer(client, given, previous_response_id=first["id"], **fields)
    assert whole["previous_response_id"] == first["id"]
    return whole


@pytest.mark.parametrize("name", ["text", "think", "said", "two", "thinkcall", "broken", "empty"])
@pytest.mark.parametrize("limit", [None, 9])
def test_a_response_continues_the_very_tokens_of_the_one_before(client: Client, name: str, limit: int | None) -> None:
    """All tokens are reused, whatever the answer was and however it ended."""
    fields = {"tools": [WEATHER], "instructions": "Be kind.", "cache_salt": f"{name}{limit}"}
    asked = {"input": f"play {name}", "temperature": 0, "max_output_tokens": limit}
    first = client.ask(PATH, **asked, **fields).json
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    new = [*results, {"role": "user", "content": "play text"}]
    second = client.ask(PATH, input=new, temperature=0, previous_response_id=first["id"], **fields).json
    used, cut = first["usage"], first["status"] == "incomplete"
    kept = used["total_tokens"] - (0 if cut else 1)  # the end of the turn belongs to the suffix
    assert second["kvarn"]["continued"] == {"id": first["id"], "tokens": kept}
    known = used["total_tokens"] - 1  # the last token of an answer is not computed
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == known
    assert text_of(second["output"][-1]) == "It is sunny."


def test_reasoning_that_the_template_drops_is_still_reused(tmp_path) -> None:
    """Chats lose what comes after it: the template renders the earlier turn in another way."""
    dropping = HERMES.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
    assert dropping != HERMES
    with serving(scripted_llm(scripted_model(tmp_path / "tiny.gguf", dropping, HERMES_CONTROL), TEXTS)) as client:
        first = client.ask(PATH, input="play think", temperature=0).json
        second = client.ask(PATH, input="play text", temperature=0, previous_response_id=first["id"]).json
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1
        message = {"role": "assistant", "content": "Sunny.", "reasoning_content": "The user asks."}
        asked = [{"role": "user", "content": "play think"}, message, {"role": "user", "content": "play text"}]
        chat = client.ask(messages=asked, temperature=0).json
        assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] <= first["usage"]["input_tokens"]


def test_a_continuation_has_the_tokens_of_the_whole_conversation(client: Client) -> None:
    """Where rendering again changes nothing, both have the same prompt."""
    first = answer(client, "play text", instructions="Be kind.")
    second = follow(client, first, "play think", instructions="Be kind.")
    third = follow(client, second, "play text", instructions="Be kind.")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "play text"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "play think"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "The user asks."},
        {"role": "user", "content": "play text"},
    ]
    assert client.ask("/tokenize", messages=messages).json["count"] == third["usage"]["input_tokens"]
    chat = client.ask(messages=messages, temperature=0).json
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == third["usage"]["input_tokens"] - 1


@pytest.mark.parametrize(
    "changed", [{"instructions": "Be rude."}, {"tools": [WEATHER]}, {"reasoning": {"effort": "low"}}]
)
def test_a_changed_beginning_is_rendered_again_and_told(client: Client, changed: dict) -> None:
    first = answer(client, "play text", instructions="Be kind.")
    second = follow(client, first, "play text", **{"instructions": "Be kind."} | changed)
    assert second["kvarn"]["continued"]["tokens"] == 0
    assert "instructions, tools or settings" in second["kvarn"]["continued"]["why"]
    assert text_of(second["output"][0]) == "It is sunny."


NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_a_template_that_shows_no_end_of_turn_is_rendered_again(tmp_path) -> None:
    with serving(scripted_llm(scripted_model(tmp_path / "tiny.gguf", NO_END), TEXTS)) as client:
        first = answer(client, "play text")
        second = follow(client, first, "play text")
        why = "the chat template does not show where an answer ends"
        assert second["kvarn"]["continued"] == {"id": first["id"], "tokens": 0, "why": why}
        assert text_of(second["output"][0]) == "It is sunny."


def test_a_template_without_an_end_token_is_continued_at_the_next_control_token(tmp_path) -> None:
    with serving(scripted_llm(scripted_model(tmp_path / "tiny.gguf", MISTRAL, MISTRAL_CONTROL), TEXTS)) as client:
        first = client.ask(PATH, input="play text", temperature=0).json
        second = client.ask(PATH, input="play text", temperature=0, previous_response_id=first["id"]).json
        n = first["usage"]["total_tokens"] - 1
        assert second["kvarn"]["continued"] == {"id": first["id"], "tokens": n}
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == n


def stored(owner: bytes, n: int) -> Stored:
    return Stored(owner, "r" * n, "h", "m", "i", array("i", range(n)))


def test_the_store_is_bounded_and_drops_what_was_not_used() -> None:
    size = stored(b"a", 100).size
    by_bytes, by_count = Responses(most_bytes=3 * size, most=100), Responses(most=3)
    for store in (by_bytes, by_count):
        for id in "abc":
            store.add(id, stored(b"a", 100))
            store.check()
        assert store.get("a", b"a") is not None
        assert store.get("a", b"b") is None
        store.add("d", stored(b"b", 100))
        store.check()
        assert [id for id in "abcd" if store.get(id, b"a") or store.get(id, b"b")] == ["a", "c", "d"]
        assert not store.remove("d", b"a")
        assert store.remove("d", b"b")
        store.check()
    by_bytes.add("large", stored(b"a", 1000))
    assert by_bytes.get("large", b"a") is None
    assert by_bytes.get("a", b"a") is not None


def test_no_key_pushes_out_all_responses_of_another() -> None:
    size = stored(b"a", 100).size
    for store in (Responses(most_bytes=8 * size, most=100), Responses(most=8)):
        store.add("old", stored(b"alice", 100))
        for i in range(100):
            store.add(f"flood {i}", stored(b"bob", 100))
            store.check()
        assert store.get("old", b"alice") is not None
        assert [i for i in range(100) if store.get(f"flood {i}", b"bob")] == list(range(93, 100))
    few = Responses(most=8)
    few.add("one that is large", stored(b"alice", 10_000))
    for i in range(100):
        few.add(str(i), stored(b"bob", 1))
    assert few.get("one that is large", b"alice") is not None
