"""Messages with tool calls, tool results and reasoning, as chat templates read them.

Templates follow the conventions of transformers: the arguments of a call are an object, and content is a
text. OpenAI's clients send arguments as JSON text and content null. Non-goals: checking messages; templates
without tools (kvarn.dialect).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvarn.errors import KvarnError

Message = Mapping[str, Any]

_PROBE = "kvarnprobe"
_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {"key": _PROBE}}}
_ASKED = {"role": "user", "content": "probe"}
PROBE: list[Message] = [_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


def takes_objects(render: Callable[[list[Message]], str]) -> bool:
    """Whether the template writes arguments that are an object as JSON, and not as Python does. `render` is that of
    the template; a template that fails takes texts."""
    try:
        text = render(PROBE)
    except KvarnError:
        return False
    return _PROBE in text and "{'key'" not in text


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
    return parsed if isinstance(parsed, dict) else given
