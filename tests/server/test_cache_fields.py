"""OpenAI's fields about the cache: hints, which are priorities, and the comparison with an earlier answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.responses import PATH as RESPONSES
from support.responses import events_of
from support.scripted import CHAT, HERMES, HERMES_CONTROL, TEXT, Client, scripted_llm, scripted_model, serving

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.server.access import Access
from kvarn.server.cache_hints import priority_of
from kvarn.server.diagnostics import CHANGED, REUSED, Comparison, anthropic_diagnostics, openai_diagnostics
from kvarn.server.protocols.responses.calls import response_call
from kvarn.server.protocols.responses.store import Responses

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 3),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1),
        ({"prompt_cache_options": {"ttl": None}}, 0),
        ({"prompt_cache_options": {"ttl": "some time"}}, 1),
        ({"messages": [{"role": "user", "content": "a", **MARK}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "prompt_cache_breakpoint": {}}]}]}, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "prompt_cache_breakpoint": {"a": 1}}]}]}, 1),
        ({"messages": [{"content": [{"content": [{"cache_control": {"ttl": "1h"}}]}]}]}, 2),
        ({"tools": [MARK], "cache_priority": 0}, 0),
        ({"system": "text", "tools": [{"cache_control": True}]}, 1),
        ({"cache_control": {"type": "ephemeral", "ttl": []}}, 1),
        ({"input": "text"}, 0),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "prompt_cache_breakpoint": {"a": 1}}]}]}, 1),
        ({"input": [{"type": "function_call_output", "output": [{"cache_control": {"ttl": "1h"}}]}]}, 2),
        ({"input": [{"role": "user", "content": "a", **MARK}], "cache_priority": 3}, 3),
    ],
)
def test_hints_are_a_priority(body: dict, priority: int) -> None:
    assert priority_of(body) == priority


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, {"text": "Fine."}, block_size=16), Access(["alice", "bob"])) as client:
        yield client


def chat(client: Client, *messages: tuple[str, str], key: str = "alice", **fields: Any) -> dict:
    talk = [{"role": role, "content": content} for role, content in messages]
    body = {"messages": talk, "temperature": 0, "max_tokens": 20, "cache_salt": "fields"} | fields
    reply = client.ask(key=key, **body)
    assert reply.status == 200, reply.body
    return reply.json


def diagnosed(client: Client, earlier: str, *messages: tuple[str, str], **fields: Any) -> dict:
    fields["prompt_cache_options"] = {"comparison_response_id": earlier}
    return chat(client, *messages, **fields)["prompt_cache_diagnostics"]


def test_the_comparison_with_an_earlier_answer(client: Client) -> None:
    system, question = ("system", "Be brief, " + "please " * 20), ("user", "play text")
    first = chat(client, system, question, tools=[TOOL])
    onward = (system, question, ("assistant", "Fine."), ("user", "play text"))
    assert diagnosed(client, first["id"], *onward, tools=[TOOL]) == {"type": "cache_hit"}
    other = TOOL | {"function": TOOL["function"] | {"name": "listen"}}
    found = diagnosed(client, first["id"], *onward, tools=[other])
    n = first["usage"]["total_tokens"]
    assert (found["type"], found["reason"], found["comparison_reusable_tokens"]) == ("cache_miss", "tools_changed", n)
    assert 0 < found["cache_missed_tokens"] <= n
    changed = ("system", "Be kind, " + "please " * 20)
    assert diagnosed(client, first["id"], changed, *onward[1:], tools=[TOOL])["reason"] == "input_changed"
    assert diagnosed(client, "chatcmpl-none", *onward) == {"type": "comparison_response_not_found"}
    assert diagnosed(client, first["id"], *onward, key="bob") == {"type": "comparison_response_not_found"}
    assert "prompt_cache_diagnostics" not in first


LOST = [each for each in Reason if each not in (*REUSED, *CHANGED)]


@pytest.mark.parametrize("reason", LOST)
def test_lost_blocks_are_no_change_of_the_client(reason: Reason) -> None:
    adoption, changed = Adoption(3, ReuseLimit(reason, 9)), Comparison(True, "turns", 40)
    assert openai_diagnostics(changed, adoption, 50) == {"type": "unavailable"}
    assert anthropic_diagnostics(changed, adoption, 50) == {"cache_miss_reason": {"type": "unavailable"}}


def test_what_the_client_sent_unchanged_is_not_called_changed() -> None:
    """The template writes the call in other tokens than the model did."""
    adoption, same = Adoption(3, ReuseLimit(Reason.DIFFERS, 3)), Comparison(True, "", 40)
    assert openai_diagnostics(same, adoption, 50) == {"type": "unavailable"}
    assert anthropic_diagnostics(same, adoption, 50) == {"cache_miss_reason": {"type": "unavailable"}}


def test_a_stream_has_it_in_its_last_chunk(client: Client) -> None:
    messages = [{"role": "user", "content": "play text"}]
    options = {"comparison_response_id": "chatcmpl-none"}
    events = client.ask(key="alice", messages=messages, stream=True, prompt_cache_options=options).events
    assert events[-1]["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert all("prompt_cache_diagnostics" not in event for event in events[:-1])
    whole = client.ask(TEXT, key="alice", prompt="play text", prompt_cache_options=options).json
    assert whole["prompt_cache_diagnostics"] == {"type": "unavailable"}, "only chats are compared"


def test_usage_counts_what_was_written(client: Client) -> None:
    first = chat(client, ("user", "play text, " + "word " * 20), cache_salt="usage")["usage"]
    n = first["prompt_tokens"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": n - max(n % 16, 1)}
    second = chat(client, ("user", "play text, " + "word " * 20), cache_salt="usage")["usage"]
    assert second["prompt_tokens_details"] == {"cached_tokens": n - 1, "cache_write_tokens": 0}


def respond(client: Client, *messages: tuple[str, str], key: str = "alice", **fields: Any) -> dict:
    items = [{"role": role, "content": content} for role, content in messages]
    body = {"input": items, "temperature": 0, "max_output_tokens": 20, "cache_salt": "responses"} | fields
    reply = client.ask(RESPONSES, key=key, **body)
    assert reply.status == 200, reply.body
    return reply.json


def test_responses_have_the_comparison_too(client: Client) -> None:
    system, question = ("system", "Be brief, " + "please " * 20), ("user", "play text")
    first = respond(client, system, question)
    compared = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    onward = respond(client, question, previous_response_id=first["id"], **compared)
    assert onward["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    chatted = chat(client, system, question, ("assistant", "Fine."), question, cache_salt="responses", **compared)
    assert chatted["prompt_cache_diagnostics"] == {"type": "cache_hit"}, "protocols share the cache and the ids"
    found = respond(client, ("system", "Be kind"), question, **compared)["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    assert found["comparison_reusable_tokens"] == first["usage"]["total_tokens"]
    stolen = respond(client, system, question, key="bob", **compared)
    assert stolen["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert "prompt_cache_diagnostics" not in first
    missing = {"prompt_cache_options": {"comparison_response_id": "resp_none"}}
    events = events_of(client.ask(RESPONSES, key="alice", input="play text", stream=True, **missing))
    last = events[-1]["response"]["prompt_cache_diagnostics"]
    assert last == {"type": "comparison_response_not_found"}
    assert all("prompt_cache_diagnostics" not in event.get("response", {}) for event in events[:-1])


def test_usage_of_responses_counts_what_was_written(client: Client) -> None:
    talk = ("user", "play text, " + "word " * 20)
    first, second = (respond(client, talk, cache_salt="written")["usage"] for _ in range(2))
    n = first["input_tokens"]
    assert first["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": n - max(n % 16, 1)}
    assert second["input_tokens_details"] == {"cached_tokens": n - 1, "cache_write_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"prompt_cache_retention": "24h"}, 3),
        ({"prompt_cache_options": {"ttl": "1h"}}, 2),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "play text", **MARK}]}]}, 1),
        ({"tools": [{"type": "function", "name": "look", **MARK}]}, 1),
        ({"tools": [{"type": "function", "name": "look", **MARK}], "cache_priority": 0}, 0),
    ],
)
def test_hints_in_responses_are_a_priority_and_not_ignored(client: Client, fields: dict, priority: int) -> None:
    raw = json.dumps({"input": "play text"} | fields).encode()
    assert response_call(raw, Responses(), b"").cache_priority == priority
    reply = client.ask(RESPONSES, key="alice", **{"input": "play text"} | fields)
    assert (reply.status, "ignored" in reply.json["kvarn"]) == (200, False), reply.body


def test_unknown_cache_options_of_responses_are_reported(client: Client) -> None:
    told = respond(client, ("user", "play text"), prompt_cache_options={"mode": "explicit", "other": 1})["kvarn"]
    assert told["ignored"] == ["prompt_cache_options.mode", "prompt_cache_options.other"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages"])
def test_parts_that_are_nested_deeply_do_no_harm(client: Client, path: str) -> None:
    nested: Any = []
    for _ in range(400):
        nested = [{"type": "text", "text": "a", "content": nested}]
    message = {"role": "user", "content": [{"type": "text", "text": "play text", "content": nested}]}
    reply = client.ask(path, key="alice", **{"input" if path == RESPONSES else "messages": [message]})
    assert (reply.status, len(reply.body) < 4096) == (200, True), reply.body


WRONG = [
    ({"prompt_cache_options": []}, "prompt_cache_options is []; it must be an object"),
    ({"prompt_cache_options": {"ttl": 5}}, "prompt_cache_options.ttl is 5; it must be a string"),
    ({"prompt_cache_options": {"comparison_response_id": "x" * 300}}, "comparison_response_id has 300; it must have"),
    ({"prompt_cache_retention": 24}, "prompt_cache_retention is 24; it must be a string"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_wrong_fields_are_named(client: Client, path: str, fields: dict, message: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    reply = client.ask(path, key="alice", **{name: [{"role": "user", "content": "play text"}]}, **fields)
    assert reply.status == 400
    assert message in reply.error
