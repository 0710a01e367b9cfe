"""OpenAI's Responses API: answers and events, from a model that writes given texts."""

import json
import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from support.hostile_http import NASTY
from support.responses import CITY, OSLO, PATH, TEXTS, WEATHER, answer, events_of, text_of
from support.scripted import (
    HERMES,
    HERMES_CONTROL,
    Client,
    scripted_llm,
    scripted_model,
    serving,
)

from kvarn.server.call import COMMENT, Answer
from kvarn.server.protocols.responses.fields import FIELDS

MESSAGE_EVENTS = ("output_item.added", "content_part.added", "output_text.delta")
MESSAGE_END = ("output_text.done", "content_part.done", "output_item.done")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS)) as client:
        yield client


def kinds(client: Client, name: str, **fields: Any) -> list[str]:
    events = events_of(client.ask(PATH, input=f"play {name}", temperature=0, stream=True, **fields))
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or not (name.endswith("delta") and name == names[i - 1])]


def test_a_text_is_a_message(client: Client) -> None:
    whole = answer(client, "play text")
    (item,) = whole["output"]
    assert (whole["id"][:5], item["id"][:4]) == ("resp_", "msg_")
    part = {"type": "output_text", "text": "It is sunny.", "annotations": [], "logprobs": []}
    assert (item["role"], item["status"], item["content"]) == ("assistant", "completed", [part])
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == ("completed", None, None)
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    expected = ["created", "in_progress", *MESSAGE_EVENTS, *MESSAGE_END, "completed"]
    assert kinds(client, "text") == expected


def test_calls_and_reasoning_are_items(client: Client) -> None:
    whole = answer(client, "play thinkcall", tools=[WEATHER])
    reasoning, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "The user asks."}]
    assert (reasoning["summary"], reasoning["type"]) == ([], "reasoning")
    assert (call["name"], call["arguments"], call["status"]) == ("weather", OSLO, "completed")
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    said = answer(client, "play said", tools=[WEATHER])
    assert [item["type"] for item in said["output"]] == ["message", "function_call"]
    assert [text_of(item) for item in answer(client, "play two", tools=[WEATHER])["output"]] == [OSLO, OSLO]
    expected = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds(client, "call", tools=[WEATHER])[2:-1] == [*expected, "output_item.done"]


def test_a_broken_call_is_a_message(client: Client) -> None:
    whole = answer(client, "play broken", tools=[WEATHER])
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert text_of(whole["output"][0]) == TEXTS["broken"]
    assert whole["kvarn"]["tool_parse_error"]


def test_an_answer_that_is_cut_is_incomplete(client: Client) -> None:
    whole = answer(client, "play text", max_output_tokens=3)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert text_of(whole["output"][0]) == "It "
    half = answer(client, "play call", tools=[WEATHER], max_output_tokens=60)
    assert [item["type"] for item in half["output"]] == ["message"]
    inside = answer(client, "play think", max_output_tokens=15)
    assert [item["type"] for item in inside["output"]] == ["reasoning"]


@pytest.mark.parametrize("given", ["", [], [{"role": "user", "content": []}]])
def test_an_empty_input_is_answered(client: Client, given: object) -> None:
    assert answer(client, given, max_output_tokens=1)["output"][0]["type"] == "message"
    assert text_of(answer(client, "play empty")["output"][0]) == ""


def test_structures_and_settings(client: Client) -> None:
    format = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    whole = answer(client, "play json", text={"format": format}, metadata={"a": "b"}, user="u")
    assert json.loads(text_of(whole["output"][0])) == {"city": "Rome"}
    assert (whole["text"]["format"], whole["metadata"], whole["user"]) == (format, {"a": "b"}, "u")
    choice = {"type": "function", "name": "weather"}
    forced = answer(client, "play call", tools=[WEATHER], tool_choice=choice)
    assert (forced["tool_choice"], forced["output"][0]["name"]) == (choice, "weather")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    assert answer(client, "play call", tools=[WEATHER], tool_choice=allowed)["output"][0]["name"] == "weather"
    assert answer(client, "play text", instructions="Be kind.")["instructions"] == "Be kind."


def test_logprobs_are_of_the_text(client: Client) -> None:
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    for name in ("text", "think"):
        (*_, message) = answer(client, f"play {name}", **fields)["output"]
        entries = message["content"][0]["logprobs"]
        spelled = "".join(entry["token"] for entry in entries)
        assert spelled.strip() == TEXTS[name].rpartition("\n")[2] + "<|endoftext|>"
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        events = events_of(client.ask(PATH, input=f"play {name}", temperature=0, stream=True, **fields))
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        streamed = [entry for event in deltas for entry in event["logprobs"]]
        assert streamed in (entries, entries[:-1])  # the end token may come after the last text


def test_items_are_the_same_conversation_as_messages(client: Client) -> None:
    """The prompt has the same tokens as that of a chat."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    messages = [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hello\nagain"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "A greeting.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny\nwarm"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "play text"},
    ]
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "again"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "A greeting."}],
            "encrypted_content": None,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": OSLO, "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny\nwarm"}]},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "play text"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k not in ("type", "strict")}}]
    reply = client.ask("/tokenize", messages=messages, tools=tools)
    fields = {"input": items, "instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.ask(f"{PATH}/input_tokens", **fields).json
    assert counted == {"object": "response.input_tokens", "input_tokens": reply.json["count"]}
    client.ask(messages=messages, tools=tools, temperature=0)
    whole = client.ask(PATH, **fields, temperature=0).json
    n = whole["usage"]["input_tokens"]
    assert (n, whole["usage"]["input_tokens_details"]["cached_tokens"]) == (counted["input_tokens"], n - 1)


def test_what_has_no_effect_is_reported(client: Client) -> None:
    reply = client.ask(
        PATH,
        temperature=0,
        input=[
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
            {"role": "user", "content": [{"type": "input_text", "text": "play text", "citations": [1]}]},
        ],
        tools=[
            {"type": "web_search"},
            {"type": "namespace", "name": "n", "tools": []},
            {"type": "custom", "name": "p"},
        ],
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="auto",
        service_tier="flex",
        client_metadata={"a": "b"},
        prompt_cache_key="k",
    )
    told = [
        *("service_tier", "include[0] (reasoning.encrypted_content)", "text.verbosity", "reasoning.summary"),
        *("truncation", "input[0] (web_search_call)", "input[1].summary", "input[1].encrypted_content"),
        *("input[2].content[0].citations", "tools[0] (web_search)", "tools[1] (namespace)", "tools[2] (custom)"),
        "reasoning.effort",
    ]
    assert reply.json["kvarn"]["ignored"] == told
    assert reply.headers["x-kvarn-ignored"] == ", ".join(told)
    assert reply.json["prompt_cache_key"] == "k"


REFUSED: dict[str, tuple[dict, str, str]] = {
    "no input": ({"input": None}, "input is missing", "input"),
    "number": ({"input": 5}, "input is 5; it must be a string or an array", "input"),
    "text items": ({"input": ["a"]}, 'input[0] is "a"; it must be an object', "input"),
    "reference": (
        {"input": [{"type": "item_reference", "id": "x"}]},
        "item_reference, which is not implemented",
        "input",
    ),
    "bare id": ({"input": [{"id": "x"}]}, "item_reference, which is not implemented", "input"),
    "unknown item": ({"input": [{"type": "dream"}]}, 'input[0].type is "dream"', "input"),
    "type list": ({"input": [{"type": ["message"]}]}, "input[0].type is", "input"),
    "role": ({"input": [{"role": "king", "content": "a"}]}, 'input[0].role is "king"', "input"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content is missing", "input"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        'input[0].content[0] is of type "input_image", which is not implemented: give input_text',
        "input",
    ),
    "part without text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text is missing",
        "input",
    ),
    "call without id": (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id is missing",
        "input",
    ),
    "half a pair in arguments": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "\\ud800"}'}]},
        "input: a call: the arguments of a call have half of a surrogate pair",
        "input",
    ),
    "background": ({"background": True}, "background is not implemented here", "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation is not implemented here", "conversation"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt is not implemented here", "prompt"),
    "max_output_tokens": (
        {"max_output_tokens": 0},
        "max_output_tokens is 0; it must be at least 1",
        "max_output_tokens",
    ),
    "unnamed tool": ({"tools": [{"type": "function"}]}, "tools[0].name is missing", "tools"),
    "tool choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice must be none, auto, required", "tool_choice"),
    "unknown function": ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "f", "tool_choice"),
    "format": ({"text": {"format": {"type": "yaml"}}}, "text.format", "text.format"),
    "metadata": ({"metadata": {"a": 1}}, "metadata.a is 1; it must be a string", "metadata"),
    "logprobs and tools": ({"top_logprobs": 1, "tools": [WEATHER]}, "top_logprobs with tools", "top_logprobs"),
    "unknown field": ({"dream": 1}, "dream is not implemented here: leave it out", "dream"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
def test_wrong_fields_are_refused_by_name(client: Client, path: str, case: str) -> None:
    fields, message, param = REFUSED[case]
    refused_by_name(client, path, fields, message, param)


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(client: Client) -> None:
    format = {"type": "json_schema", "name": "a", "schema": {"type": "dream"}}
    refused_by_name(client, PATH, {"text": {"format": format}}, "text.format", "text.format")


def refused_by_name(client: Client, path: str, fields: dict, message: str, param: str) -> None:
    reply = client.ask(path, **{"input": "play text"} | fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body
    assert message in reply.error
    assert "\n" not in reply.error


def hostile() -> Iterator[dict]:
    """Wrong values in every place of a request."""
    tool = {k: v for k, v in WEATHER.items() if k != "description"}
    items = {
        "message": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        "call": {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "id": "x",
            "status": "completed",
        },
        "result": {"type": "function_call_output", "call_id": "c", "output": "a"},
        "reasoning": {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    }
    for value in NASTY:
        yield from ({name: value} for name in FIELDS.table)
        yield from ({"input": [value]}, {"input": [{"role": "user", "content": [value]}]}, {"tools": [value]})
        for item in items.values():
            yield from ({"input": [item | {key: value}]} for key in item)
        yield from (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"} | {key: value}]}]}
            for key in ("type", "text", "annotations")
        )
        yield from ({"tools": [tool | {key: value}]} for key in tool)
        yield from (
            {name: {key: value}}
            for name, key in (
                *(("text", "format"), ("text", "verbosity"), ("reasoning", "effort"), ("reasoning", "summary")),
                *(("tool_choice", "type"), ("metadata", "a"), ("stream_options", "include_obfuscation")),
            )
        )


def test_hostile_values_are_answered_or_refused_in_one_line(client: Client) -> None:
    for fields in islice(hostile(), 0, None, 2):
        reply = client.ask(PATH, **{"input": "play empty", "max_output_tokens": 1} | fields)
        assert reply.status in (200, 400, 404), (fields, reply.body)
        if reply.status != 200:
            assert len(reply.error) < 300, fields
            assert "\n" not in reply.error


def test_a_stream_that_is_silent_for_long_gets_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is computed: proxies and clients would give up. The events are the same."""
    llm = scripted_llm(scripted_model(tmp_path / "tiny.gguf", HERMES, HERMES_CONTROL), TEXTS)
    works, send, seen, steps = llm.program.run, Answer._frame, threading.Event(), count()

    def run(*arguments: Any) -> Any:
        assert next(steps) == 0 or seen.wait(60)  # a request is accepted with its first step
        return works(*arguments)

    async def frame(self: Answer, to: Any, frame: bytes) -> None:
        if frame == COMMENT:
            seen.set()
        await send(self, to, frame)

    with serving(llm) as client:
        fields = {"input": "play text", "temperature": 0, "stream": True}
        plain = events_of(client.ask(PATH, **fields))[-1]["response"]["output"][0]["content"]
        monkeypatch.setattr("kvarn.server.call.SILENCE", 0.01)
        monkeypatch.setattr(Answer, "_frame", frame)
        llm.program.run = run
        reply = client.ask(PATH, **fields)
        assert COMMENT in reply.body
        events = events_of(reply._replace(body=reply.body.replace(COMMENT, b"")))
        assert events[-1]["response"]["output"][0]["content"] == plain


def test_a_stream_that_fails_ends_with_the_failure(tmp_path: Path) -> None:
    llm = scripted_llm(scripted_model(tmp_path / "tiny.gguf", HERMES, HERMES_CONTROL), TEXTS)
    with serving(llm) as client:
        works, steps = llm.program.run, count()

        def run(*arguments: Any) -> Any:
            if next(steps) > 3:
                raise MemoryError("no room")
            return works(*arguments)

        llm.program.run = run
        events = events_of(client.ask(PATH, input="play text", temperature=0, stream=True))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", "server_error", [])
        assert "internal error of the server" in failed["error"]["message"]
        assert client.get(f"{PATH}/{failed['id']}").status == 404
        whole = client.ask(PATH, input="play text", temperature=0)
        assert (whole.status, whole.json["error"]["type"]) == (500, "server_error")
        llm.program.run = works
        assert client.ask(PATH, input="play text", temperature=0).status == 200
