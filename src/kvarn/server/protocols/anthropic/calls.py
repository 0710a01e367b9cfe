"""Anthropic's messages: from a body to a call, by way of OpenAI's names.

Blocks become messages: those of a result become a message of role `tool`, thinking becomes the reasoning of its turn.
Turns of one role that follow each other are one turn, as in Anthropic's API.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvarn.server.cache_hints import priority_of
from kvarn.server.ignored import Ignored, is_no_op, others, shown
from kvarn.server.parse import Call, call_of, checked
from kvarn.server.protocols.anthropic import fields as F
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json, Schema, problem
from kvarn.server.talk import Talk, talk_of

FIELDS = F.FIELDS
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
MODALITIES = {"image": "image input is not supported", "document": "document input is not supported"}
NUMBERS = ("temperature", "top_p", "top_k", "stream", "seed", "request_id", "cache_salt")
ERROR = "Error: "  # before a result that is one: templates have no other place for it


def messages_call(raw: bytes) -> Call:
    body, talk, ignored = _read(raw)
    asked = {name: body[name] for name in NUMBERS if name in body}
    asked |= {"model": body.get("model"), "stop": body.get("stop_sequences", []), "cache_priority": priority_of(body)}
    if form := _format(body):
        asked["json_schema"] = form[1]
    most = int(body["max_tokens"]) if "max_tokens" in body else None
    try:
        call = call_of(asked, None, None, talk, default_tokens=most, ignored=ignored)
    except Refusal as refusal:
        if form and refusal.param == "json_schema":
            raise Refusal(400, f"{form[0]}: {refusal}", form[0], logged=f"{form[0]} cannot be used") from None
        raise
    diagnostics = body.get("diagnostics")
    return replace(
        call,
        structure_field=form[0] if form else "",
        given={} if diagnostics is None else {"diagnostics": True},
        compared=None if diagnostics is None else diagnostics.get("previous_message_id"),
    )


def _read(raw: bytes) -> tuple[Json, Talk, list[Ignored]]:
    """The checked body, its conversation, and what has no effect."""
    body = checked(raw, FIELDS)
    messages = [*_system(body), *_messages(body["messages"])]
    if not any(message["role"] != "system" for message in messages):
        raise Refusal(400, "messages has no turn to answer: give at least one with content", "messages")
    choice = body.get("tool_choice", {"type": "auto"})
    if choice["type"] == "tool" and not choice.get("name"):
        raise Refusal(400, "tool_choice.name is missing: name the tool", "tool_choice")
    thinking, config = body.get("thinking", {}), body.get("output_config", {})
    translated = {
        "messages": messages,
        "tools": [_tool(tool, i) for i, tool in enumerate(body.get("tools", ())) if _is_custom(tool)],
        "tool_choice": CHOICES.get(choice["type"]) or {"type": "function", "function": {"name": choice["name"]}},
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        "chat_template_kwargs": body.get("chat_template_kwargs", {}),
        "reasoning_effort": config.get("effort"),
        "include_reasoning": thinking.get("type") != "disabled",
    }
    thinks = thinking["type"] != "disabled" if thinking else None
    talk = replace(talk_of(translated), thinks=thinks, effort_field="output_config.effort")
    if messages and messages[-1]["role"] == "assistant" and not talk.continues:
        message = "messages end with a turn of the assistant without a text, or with calls, which cannot be continued"
        raise Refusal(400, f"{message}: end with one of the user", "messages")
    return body, talk, list(_ignored(body))


def _system(body: Json) -> Iterator[Json]:
    if text := _text(body.get("system", ""), "system"):
        yield {"role": "system", "content": text}


def _messages(messages: list[Json]) -> Iterator[Json]:
    turns: list[tuple[str, list[tuple[str, Json]]]] = []  # role, and the blocks with their names
    for i, message in enumerate(messages):
        where, content = f"messages[{i}].content", message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        named = [(f"{where}[{j}]", block) for j, block in enumerate(blocks)]
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1].extend(named)
        else:
            turns.append((message["role"], named))
    for role, named in turns:
        yield from _assistant(named) if role == "assistant" else _user(role, named)


def _user(role: str, named: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    """Results come first: they belong to the calls of the turn before."""
    texts = []
    for where, block in named:
        if block["type"] == "tool_result":
            _check(block, where, {"tool_use_id": F.TEXT, "content": F.BLOCKS, "is_error": {"type": "boolean"}}, 1)
            text = _text(block.get("content") or "", f"{where}.content")
            yield {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": ERROR + text if block.get("is_error") else text,
            }
        else:
            texts.append(_text([block], where))
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(named: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    texts, thoughts, calls = [], [], []
    for where, block in named:
        kind = block["type"]
        if kind == "tool_use":
            _check(block, where, {"id": F.TEXT, "name": {"type": "string", "minLength": 1}, "input": F.OBJECT}, 3)
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "thinking":
            _check(block, where, {"thinking": F.TEXT}, 1)
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(_text([block], where))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield message | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[Json], where: str) -> str:
    """Of a text, or of blocks that must be texts."""
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        name = where if len(content) == 1 else f"{where}[{i}]"
        if block["type"] != "text":
            kind = shown(block["type"])
            reason = MODALITIES.get(kind, f"blocks of type {kind} are not implemented here")
            raise Refusal(400, f"{name}: {reason}; leave it out", where.partition("[")[0], "unsupported_parameter")
        _check(block, name, {"text": F.TEXT}, 1)
    return "\n".join(block["text"] for block in content)


def _check(block: Json, where: str, properties: dict[str, Schema], n_required: int) -> None:
    """A field that is null counts as absent. The first `n_required` must be there."""
    given = {key: value for key, value in block.items() if value is not None}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:n_required]}
    if wrong := problem(given, schema, where):
        raise Refusal(400, wrong.message, where.partition("[")[0], logged=wrong.unquoted)


def _is_custom(tool: Json) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(tool: Json, i: int) -> Json:
    for name in ("name", "input_schema"):
        if tool.get(name) is None:
            raise Refusal(400, f"tools[{i}].{name} is missing", "tools")
    given = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    given["strict"] = tool.get("strict")
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def _format(body: Json) -> tuple[str, Json] | None:
    """The field that shapes the answer, and its schema."""
    inside = body.get("output_config", {}).get("format")
    if inside is not None and "output_format" in body:
        raise Refusal(400, "output_config.format and output_format both shape the answer: give one", "output_format")
    name, form = (
        ("output_config.format", inside) if inside is not None else ("output_format", body.get("output_format"))
    )
    return None if form is None else (name, form["schema"])


def _ignored(body: Json) -> Iterator[Ignored]:
    for name, value in body.items():
        if name in F.IGNORED and not is_no_op(name, value, F.NO_OPS):
            yield Ignored(name, name)
    yield from others("thinking", body.get("thinking", {}), F.USED_IN_THINKING, F.UNUSED_IN_THINKING, "thinking")
    yield from others(
        "output_config", body.get("output_config", {}), F.USED_IN_CONFIG, F.UNUSED_IN_CONFIG, "output_config"
    )
    for i, tool in enumerate(body.get("tools", ())):
        if _is_custom(tool):
            yield from others("tools", tool, F.USED_IN_TOOL, F.UNUSED_IN_TOOL, f"tools[{i}]")
        else:
            kind = re.sub(r"_\d{8}$", "", tool["type"])
            yield Ignored(f"tools.{kind if kind in F.SERVER_TOOLS else 'other'}", f"tools[{i}] ({shown(tool['type'])})")
    yield from _ignored_in(body.get("system"), "system")
    for i, message in enumerate(body["messages"]):
        yield from _ignored_in(message["content"], f"messages[{i}].content")


def _ignored_in(blocks: Any, where: str) -> Iterator[Ignored]:
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        name, kind = f"{where}[{i}]", block["type"]
        if kind == "redacted_thinking":
            yield Ignored("messages.redacted_thinking", f"{name} (redacted_thinking)")
            continue
        used = ("type", *F.USED_IN_BLOCK.get(kind, ()))
        yield from others("messages.content", block, used, F.UNUSED_IN_BLOCK, name)
        if kind == "tool_result":
            yield from _ignored_in(block.get("content"), f"{name}.content")
