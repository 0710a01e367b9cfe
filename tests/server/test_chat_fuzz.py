"""Random changes of valid chats with tools: no request gets a 500, and whatever is answered has OpenAI's form."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_llm, scripted_model, serving

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
BODY = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "play call", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "play text"},
    ],
    "tools": [WEATHER, {"type": "web_search"}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "max_tokens": 40,
    "n": 2,
}
ODD: list[Any] = [
    *(None, True, 0, -1, 2**70, 0.5, "", "a", "<|im_end|>", "\ud7ff\u0000", "{", "auto", "required", [], {}, [[]]),
    *(
        {"type": "function"},
        {"type": "object"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"name": "weather"},
        "x" * 999,
    ),
]
CASES = 300


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    texts = {"text": "Fine.", "call": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'}
    with serving(scripted_llm(model, texts)) as client:
        yield client


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(choose: random.Random) -> dict:
    body = copy.deepcopy(BODY)
    for name in choose.sample(sorted(body.keys() - {"messages", "max_tokens"}), choose.randrange(5)):
        del body[name]
    for _ in range(choose.randrange(1, 3)):
        *path, last = choose.choice(list(places(body)))
        inner: Any = body
        for key in path:
            inner = inner[key]
        match choose.randrange(3):
            case 0:
                inner[last] = choose.choice(ODD)
            case 1:
                del inner[last]
            case 2 if isinstance(inner, dict):
                inner[choose.choice(["type", "content", "strict", "mood", "name"])] = choose.choice(ODD)
            case _:
                inner.append(copy.deepcopy(inner[last])) if isinstance(inner, list) else None
    return body


def test_no_request_gets_a_500(client: Client) -> None:
    choose, answered = random.Random(18), 0
    for case in range(CASES):
        body = changed(choose)
        stream = choose.random() < 0.5
        reply = client.ask(**body | {"stream": stream})
        assert reply.status in (200, 400), (case, reply.body, body)
        if reply.status == 400:
            assert "\n" not in reply.error, case
            continue
        answered += 1
        choices = reply.events[0]["choices"] if stream else reply.json["choices"]
        assert choices, case
        for choice in [] if stream else choices:
            for call in choice["message"].get("tool_calls", []):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert CASES / 10 < answered < CASES, "both kinds of requests were tried"
