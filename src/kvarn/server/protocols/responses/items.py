"""The input of a response: items of OpenAI's Responses API, as messages of a chat, and as they are listed again."""

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvarn.server.chat_fields import HINTS
from kvarn.server.ignored import Ignored, named, others, shown
from kvarn.server.protocols.responses.fields import (
    BOOKKEEPING,
    ITEMS,
    OTHER_ITEMS,
    UNUSED_IN_ITEM,
    UNUSED_IN_PART,
    USED_IN_ITEM,
)
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json, problem, show

Message = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}  # of ids
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def new_id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


class Item(NamedTuple):
    where: str  # for errors
    body: Json  # with its type


def items_of(given: str | Sequence[Json]) -> tuple[list[Item], list[Ignored]]:
    """The items of a request's `input`, checked, and what they have without effect."""
    if isinstance(given, str):
        return [Item("input", {"type": "message", "role": "user", "content": given})], []
    items: list[Item] = []
    ignored: list[Ignored] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = _kind(item, where)
        if kind in OTHER_ITEMS:
            ignored.append(named("input", kind, OTHER_ITEMS, f"{where} ({shown(kind)})"))
            continue
        if wrong := problem(item, ITEMS[kind], where):
            raise Refusal(400, wrong.message, "input", logged=wrong.unquoted)
        items.append(Item(where, {**item, "type": kind}))
        ignored += _unused(item, kind, where)
    return items, ignored


def _kind(item: Json, where: str) -> str:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference" or (kind is None and set(item) == {"id"}):
        message = f"{where} is an item_reference, which is not implemented: send the item itself"
        raise Refusal(400, message, "input", "unsupported_parameter")
    if not isinstance(kind, str) or (kind not in ITEMS and kind not in OTHER_ITEMS):
        known = ", ".join(ITEMS)
        raise Refusal(400, f"{where}.type is {show(kind)}; it must be one of {known}", "input", logged=f"{where}.type")
    return kind


def _unused(item: Json, kind: str, where: str) -> Iterable[Ignored]:
    present = {key: value for key, value in item.items() if value}  # clients send empty ones back
    yield from others("input", present, (*BOOKKEEPING, *USED_IN_ITEM[kind], *HINTS), UNUSED_IN_ITEM, where)
    field = "output" if kind.endswith("_output") else "content"
    parts = item.get(field)
    for j, part in enumerate(parts if isinstance(parts, list) else ()):
        present = {key: value for key, value in part.items() if value}
        used = ("type", "text", "refusal", *HINTS)
        yield from others("input.content", present, used, UNUSED_IN_PART, f"{where}.{field}[{j}]")


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Reasoning, a text and the calls after it are one message of an assistant."""
    messages: list[Message] = []
    turn: Message = {}  # of the assistant, as far as it is known
    for where, item in items:
        kind = item["type"]
        if kind.endswith("_output") or (kind == "message" and item["role"] != "assistant"):
            messages += _finished(turn)
            turn = {}
            messages.append(_other_turn(item, where))
        elif kind.endswith("_call"):
            turn.setdefault("tool_calls", []).append(_call(item))
        else:
            if turn.get("tool_calls") or turn.get("content"):
                messages += _finished(turn)
                turn = {}
            turn |= _of_assistant(item, where)
    return messages + _finished(turn)


def _finished(turn: Message) -> list[Message]:
    if not turn or not (turn.get("tool_calls") or turn.get("reasoning_content") or "content" in turn):
        return []
    return [{"role": "assistant", "content": turn.get("content"), **turn}]


def _of_assistant(item: Json, where: str) -> Message:
    if item["type"] == "message":
        return {"content": _text(item["content"], f"{where}.content")}
    reasoning = _text(item.get("content") or "", f"{where}.content")
    return {"reasoning_content": reasoning} if reasoning else {}


def _call(item: Json) -> Json:
    arguments = item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]}, ensure_ascii=False)
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _other_turn(item: Json, where: str) -> Message:
    if item["type"] == "message":
        return {"role": item["role"], "content": _text(item["content"], f"{where}.content")}
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"], f"{where}.output")}


def _text(content: str | Sequence[Json], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_of_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _of_part(part: Json, where: str) -> str:
    kind = part["type"]
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*TEXT_PARTS, "refusal") else None
    if text is None:
        if kind in (*TEXT_PARTS, "refusal"):
            raise Refusal(400, f"{where}.text is missing", "input")
        message = f"{where} is of type {show(kind)}, which is not implemented: give input_text"
        raise Refusal(400, message, "input", "unsupported_parameter", logged=f"{where}.type is not implemented")
    return str(text)


def listed(item: Json) -> Json:
    """As /v1/responses/ID/input_items shows it: with an id, a status, and content as parts."""
    kind = item["type"]
    new: Json = {"id": new_id(kind), "status": "completed"} | {k: v for k, v in item.items() if v is not None}
    if kind == "message" and isinstance(item["content"], str):
        assistant = item["role"] == "assistant"
        part: Json = {"type": "output_text" if assistant else "input_text", "text": item["content"]}
        new["content"] = [part | ({"annotations": [], "logprobs": []} if assistant else {})]
    if kind == "reasoning":
        new["summary"] = item.get("summary") or []
    return new
