"""Messages with tool calls, tool results and reasoning, as chat templates read them.

Templates follow the conventions of transformers: the arguments of a call are an object, and content is a
text. OpenAI's clients send arguments as JSON text and content null. Non-goals: checking messages; templates
without tools (kvarn.dialect).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.errors import KvarnError

Message = Mapping[str, Any]


def for_template(messages: Sequence[Message], objects: bool = True) -> list[Message]:
    """`objects`: arguments of calls are given as objects, where they are JSON of one."""
    names: dict[str, str] = {}  # of the functions, by the id of the call
    return [_message(message, names, objects) for message in messages]


def _message(message: Message, names: dict[str, str], objects: bool) -> Message:
    new = dict(message)
    if new.get("content") is None:
        new["content"] = ""
    if calls := new.get("tool_calls"):
        new["tool_calls"] = [_call(call, names, objects) for call in calls]
    else:
        new.pop("tool_calls", None)
    reasoning = new.get("reasoning_content") or new.pop("reasoning", None)
    if reasoning:
        new["reasoning_content"] = reasoning
    if new.get("role") == "tool" and "name" not in new and new.get("tool_call_id") in names:
        new["name"] = names[new["tool_call_id"]]
    return new


def _call(call: Message, names: dict[str, str], objects: bool) -> Message:
    function = call["function"]
    arguments = _arguments(function.get("arguments", "{}"), objects)
    if isinstance(id := call.get("id"), str):
        names[id] = function["name"]
    return {"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(given: Any, objects: bool) -> Any:
    if not objects:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if not isinstance(given, str):
        return given
    try:
        parsed = json.loads(given or "{}", parse_constant=str)
    except (ValueError, RecursionError):
        return given
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise KvarnError("the arguments of a call have half of a surrogate pair, which is not a character") from None
    return parsed if isinstance(parsed, dict) else given
