"""The tools that an answer may call, and whether it must: OpenAI's `tools`, `tool_choice`, `parallel_tool_calls`.

Non-goals: how a model writes a call (kvarn.dialect); which JSON schemas can be enforced (kvarn.structured).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.dialect import Tool
from kvarn.errors import KvarnError, printable

Tools = Sequence[Mapping[str, Any]] | None  # [{"type": "function", "function": {"name": ..., "parameters": {...}}}]
Json = dict[str, Any]

MOST_TOOLS = 512
NAME = r"[A-Za-z0-9_.-]{1,128}"
NO_ARGUMENTS: Json = {"type": "object", "properties": {}}
MODES = ("none", "auto", "required")


class BadTools(KvarnError):
    """`field`: the request's field that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call.

    shown       all tools of the request, as chat templates get them
    tools       the tools that the answer may call; none if it is only text
    required    the answer is at least one call
    parallel    the answer may have several calls
    """

    shown: tuple[Json, ...] = ()
    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def strict(self) -> bool:
        """Whether what the model writes must be restricted, even if it need not call anything."""
        return bool(self.tools) and (not self.parallel or any(tool.strict for tool in self.tools))


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, parallel: bool = True) -> ToolUse:
    """`choice`: none, auto, required, {"type": "function", ...} or {"type": "allowed_tools", ...}; None is auto. All
    tools are functions."""
    tools = () if tools is None else tools
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise BadTools("tools", "tools must be a list of functions")
    if not isinstance(parallel, bool):
        raise BadTools("parallel_tool_calls", "parallel_tool_calls must be true or false")
    if len(tools) > MOST_TOOLS:
        raise BadTools("tools", f"tools has {len(tools)} items; it must have at most {MOST_TOOLS}")
    known = {tool.name: tool for tool in (_tool(i, given) for i, given in enumerate(tools))}
    if len(known) < len(tools):
        raise BadTools("tools", "tools has two functions of one name: give each a name of its own")
    shown = tuple(_shown(given) for given in tools)
    required, names = _chosen(choice, known)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        parallel = False  # one call of this function
    if required and not names:
        raise BadTools("tool_choice", "tool_choice asks for a call and there is no function to call: give tools")
    return ToolUse(shown, tuple(known[name] for name in names), required, parallel)


def _tool(i: int, given: Any) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type") != "function":
        raise BadTools("tools", f'tools[{i}] is not a function: give {{"type": "function", "function": {{...}}}}')
    where = f"tools[{i}].function"
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        rule = "1 to 128 letters and digits of ASCII, _, - and ."
        raise BadTools("tools", f"{where}.name is {printable(repr(name))[:80]}; it must have {rule}")
    if not isinstance(description, str | None):
        raise BadTools("tools", f"{where}.description must be a text")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise BadTools("tools", f"{where}.parameters must be a JSON schema")
    kind = (parameters or NO_ARGUMENTS).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadTools("tools", f"{where}.parameters.type is {printable(repr(kind))[:80]}; it must be object")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise BadTools("tools", f"{where}.strict must be true or false")
    try:
        json.dumps(given)
    except (TypeError, ValueError, RecursionError):
        raise BadTools("tools", f"tools[{i}] cannot be written as JSON") from None
    return Tool(name, description or "", dict(parameters or NO_ARGUMENTS), strict is True)


def _shown(given: Mapping[str, Any]) -> Json:
    """Without `strict`, which models do not know."""
    function = {key: value for key, value in given["function"].items() if key != "strict" and value is not None}
    function.setdefault("parameters", NO_ARGUMENTS)
    return {"type": "function", "function": function}


def _chosen(choice: Any, known: Mapping[str, Tool]) -> tuple[bool, list[str]]:
    """Whether a call is required, and the names of the tools that may be called."""
    if choice is None or choice in MODES:
        return choice == "required", [] if choice == "none" else list(known)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return True, [_name(choice, known)]
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) and kind == "allowed_tools" else None
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise BadTools("tool_choice", "tool_choice.allowed_tools.mode must be auto or required")
        wanted = {_name(each, known) for each in allowed["tools"] if _is_function(each)}
        return mode == "required", [name for name in known if name in wanted]
    raise BadTools(
        "tool_choice",
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    )


def _is_function(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get("type") == "function"


def _name(choice: Mapping[str, Any], known: Mapping[str, Tool]) -> str:
    """Of a chosen function. Some clients give it without the inner object."""
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or name not in known:
        raise BadTools("tool_choice", f"tool_choice names {printable(repr(name))[:80]}, which is not one of tools")
    return name
