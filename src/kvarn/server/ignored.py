"""What a request has that is accepted without effect. The answer names it, a header too, and a metric counts it.

The list of such fields is closed (request_fields.py, chat_fields.py): what is in no list is refused.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvarn.server.chat_fields import (
    UNUSED_IN_CALL,
    UNUSED_IN_MESSAGE,
    UNUSED_IN_PART,
    UNUSED_IN_TOOL,
    USED_IN_CALL,
    USED_IN_PART,
    USED_IN_TOOL,
)
from kvarn.server.request_fields import NO_OPS, OPTIONS, Fields
from kvarn.server.schema import same, show

HEADER = "x-kvarn-ignored"
MOST_TOLD = 32
MOST_HEADER = 1024
TOOL_TYPES = (
    *("custom", "web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview"),
    *("image_generation", "mcp", "local_shell", "shell", "apply_patch", "namespace"),
)
OTHER = "other"


class Ignored(NamedTuple):
    """`field`: for the metric, one of a few names. `where`: for the caller."""

    field: str
    where: str


def is_no_op(name: str, value: Any, no_ops: Mapping[str, list[Any]] = NO_OPS) -> bool:
    """Whether the value of a field that is not implemented has no effect."""
    return any(same(value, each) for each in no_ops.get(name, ()))


def of_fields(body: dict[str, Any], fields: Fields = Fields({})) -> list[Ignored]:  # noqa: B008 (immutable)
    """The fields of a body that have no effect."""
    given = ((name, value) for name, value in body.items() if name in fields.ignored)
    return [Ignored(name, name) for name, value in given if not is_no_op(name, value, fields.no_ops)]


def of_cache_options(body: dict[str, Any]) -> list[Ignored]:
    name = "prompt_cache_options"
    return others(name, body.get(name, {}), OPTIONS, ("mode",), name)


def of_body(body: dict[str, Any]) -> list[Ignored]:
    """Of the body of a chat or a completion that has the right form."""
    found = [*of_fields(body), *of_cache_options(body)]
    for i, message in enumerate(body.get("messages", ())):
        found += _of_message(message, f"messages[{i}]")
    for i, tool in enumerate(body.get("tools", ())):
        if tool["type"] != "function":
            found.append(named("tools", tool["type"], TOOL_TYPES, f"tools[{i}] ({shown(tool['type'])})"))
        else:
            found += others("tools", tool, USED_IN_TOOL, UNUSED_IN_TOOL, f"tools[{i}]")
    return found


def _of_message(message: dict[str, Any], where: str) -> Iterable[Ignored]:
    for key in UNUSED_IN_MESSAGE:
        if message.get(key):  # clients send empty ones back
            yield Ignored(f"messages.{key}", f"{where}.{key}")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        yield from others("messages.content", part, USED_IN_PART, UNUSED_IN_PART, f"{where}.content[{i}]")
    for i, call in enumerate(message.get("tool_calls") or ()):
        yield from others("messages.tool_calls", call, USED_IN_CALL, UNUSED_IN_CALL, f"{where}.tool_calls[{i}]")


def others(field: str, given: dict[str, Any], used: Iterable[str], known: Iterable[str], where: str) -> list[Ignored]:
    """Of an object: what has no effect in it. `known`: those keys that the metric may name."""
    keys = [key for key in given if key not in used and given[key] is not None]
    return [named(field, key, known, f"{where}.{shown(key)}") for key in keys]


def of_constraint(stop: Iterable[str], structure: str) -> list[Ignored]:
    """Of a request whose answer is constrained. `structure`: a field that has no effect, because calls are required."""
    return [Ignored(name, name) for name in (*(["stop"] if stop else []), *([structure] if structure else []))]


def of_variables(names: Iterable[str], used: Iterable[str]) -> list[Ignored]:
    """Of `chat_template_kwargs`: those that the chat template does not use."""
    unused = set(names) - set(used)
    prefix = "chat_template_kwargs"
    return [Ignored(prefix, f"{prefix}.{shown(name)}") for name in sorted(unused)]


def list_of(ignored: list[Ignored]) -> list[str]:
    """For the answer; a long list is cut."""
    where = [each.where for each in ignored]
    more = len(where) - MOST_TOLD
    return where if more <= 0 else [*where[:MOST_TOLD], f"and {more} more"]


def headers(ignored: list[Ignored]) -> dict[str, str]:
    if not ignored:
        return {}
    text = ", ".join(list_of(ignored))
    return {HEADER: text if len(text) <= MOST_HEADER else f"{text[:MOST_HEADER]} ..."}


def named(field: str, key: str, known: Iterable[str], where: str) -> Ignored:
    """A client may choose any key, so the metric has only those that are known."""
    return Ignored(f"{field}.{key if key in known else OTHER}", where)


def shown(key: str) -> str:
    """In ASCII, short, without characters that a header cannot carry."""
    return json.dumps(show(key)[1:-1])[1:-1]
