"""Every answer and every event against the types of the `openai` package, strictly.

The package's types are generated from OpenAI's OpenAPI document, and stand in for it here: the document itself is in no
package registry. What is sent is read without the package, so that nothing is converted. A field that the types do not
know must be in EXTENSIONS.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from openai.pagination import SyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter
from rows import ASKED, FOX, MODEL, QUESTION, run, works

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
WEATHER = {"type": "function", **FUNCTION, "strict": False}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {**CITY, "additionalProperties": False}, "strict": True}
EXTENSIONS = {
    "kvarn",  # the explanation
    "bytes",  # of a token; for whole answers the types have it, for events not
    "reasoning_content",  # as in DeepSeek's API
    "max_model_len",  # as in vLLM's
    "timings",  # as in llama.cpp's
    "models",  # for Codex
    *("store", "presence_penalty", "frequency_penalty"),  # of the Open Responses specification
}
CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2},
    "calls": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100},
    "structure": {"response_format": {"type": "json_object"}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"metadata": {"a": "b"}, "user": "u", "instructions": "Be brief.", "prompt_cache_key": "k"},
    "cache": {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
    "items": {"input": [{"role": "developer", "content": "Hi"}, {"role": "user", "content": QUESTION}]},
    "whole": {"max_output_tokens": 300, "reasoning": {"effort": "low"}, "service_tier": "auto"},
    "logprobs": {"top_logprobs": 3, "include": ["message.output_text.logprobs"]},
    "calls": {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": "required", "max_output_tokens": 100},
    "one call": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "max_output_tokens": 100,
    },
    "structure": {"text": {"format": SCHEMA}, "max_output_tokens": 100},
}


def fetch(address: str, path: str, body: dict | None = None, method: str | None = None) -> str:
    data = None if body is None else json.dumps({"model": MODEL, "temperature": 0} | body).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", data, method=method)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def events(text: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


def valid(kind: Any, raw: str) -> None:
    value = TypeAdapter(kind).validate_json(raw, strict=True)
    unknown = set(extras(value)) - EXTENSIONS
    assert not unknown, f"unknown fields: {sorted(unknown)} in {raw[:200]}"


def extras(value: Any) -> Iterator[str]:
    """Fields that the types do not have, at any depth."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from extras(each)


def models(address: str) -> None:
    valid(SyncPage[Model], fetch(address, "models"))
    valid(Model, fetch(address, f"models/{MODEL}"))


def chats(address: str) -> None:
    for fields in CHATS.values():
        body = {"messages": ASKED, "max_tokens": 20} | fields
        valid(ChatCompletion, fetch(address, "chat/completions", body))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for event in events(fetch(address, "chat/completions", body | options)):
            valid(ChatCompletionChunk, event)


def completions(address: str) -> None:
    for fields in ({}, {"logprobs": 2}, {"echo": True}, {"n": 2, "stop": "."}):
        body = {"prompt": FOX, "max_tokens": 8} | fields
        valid(Completion, fetch(address, "completions", body))
        for event in events(fetch(address, "completions", body | {"stream": True})):
            # OpenAI's own chunks have null here, which its document does not allow.
            valid(Completion, event.replace('"finish_reason":null', '"finish_reason":"stop"'))


def responses(address: str) -> None:
    for fields in RESPONSES.values():
        body = {"input": QUESTION, "max_output_tokens": 20} | fields
        whole = fetch(address, "responses", body)
        valid(Response, whole)
        id = json.loads(whole)["id"]
        assert fetch(address, f"responses/{id}") == whole
        valid(ResponseItemList, fetch(address, f"responses/{id}/input_items"))
        valid(InputTokenCountResponse, fetch(address, "responses/input_tokens", body))
        following = {"input": "Why?", "previous_response_id": id, "max_output_tokens": 8}
        valid(Response, fetch(address, "responses", following))
        assert json.loads(fetch(address, f"responses/{id}", method="DELETE"))["deleted"]


def response_events(address: str) -> None:
    seen = set()
    for fields in RESPONSES.values():
        body = {"input": QUESTION, "max_output_tokens": 20, "stream": True} | fields
        for event in events(fetch(address, "responses", body)):
            valid(ResponseStreamEvent, event)
            seen.add(json.loads(event)["type"].removeprefix("response."))
    parts = ("output_item", "content_part", "output_text", "function_call_arguments")
    ends = {f"{part}.done" for part in parts} | {"completed", "incomplete"}
    assert ends | {"created", "in_progress", "output_text.delta", "function_call_arguments.delta"} <= seen


def errors(address: str) -> None:
    """All have the four fields of OpenAI's error object."""
    for path in ("chat/completions", "completions", "responses", "responses/none"):
        try:
            fetch(address, path, None if "none" in path else {"no_such_field": 1})
        except urllib.error.HTTPError as refusal:
            error = json.loads(refusal.read())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        else:
            raise AssertionError("it was not refused")


ROWS = [
    works("models", models),
    works("chat completions: text, logprobs, calls, a structure; whole and every chunk", chats),
    works("completions: text, logprobs, echo; whole and every chunk", completions),
    works("responses: text, items, logprobs, calls, a structure; stored ones and their items", responses),
    works("responses: every event", response_events),
    works("errors", errors),
]

if __name__ == "__main__":
    run(("openai", "pydantic"), ROWS)
