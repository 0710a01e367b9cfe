"""OpenAI's fields about the cache: hints, which are priorities, and the comparison with an earlier answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, TEXT, Client, scripted_llm, scripted_model, serving

from kvarn.server.access import Access
from kvarn.server.cache_hints import priority_of

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


WRONG = [
    ({"prompt_cache_options": []}, "prompt_cache_options is []; it must be an object"),
    ({"prompt_cache_options": {"ttl": 5}}, "prompt_cache_options.ttl is 5; it must be a string"),
    ({"prompt_cache_options": {"comparison_response_id": "x" * 300}}, "comparison_response_id has 300; it must have"),
    ({"prompt_cache_retention": 24}, "prompt_cache_retention is 24; it must be a string"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_fields_are_named(client: Client, fields: dict, message: str) -> None:
    reply = client.ask(key="alice", messages=[{"role": "user", "content": "play text"}], **fields)
    assert reply.status == 400
    assert message in reply.error
