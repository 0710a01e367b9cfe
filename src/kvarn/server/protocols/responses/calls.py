"""/v1/responses: from a body to a call."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarn.server.cache_hints import priority_of
from kvarn.server.chat_fields import HINTS
from kvarn.server.ignored import TOOL_TYPES, Ignored, named, of_cache_options, of_fields, others, shown
from kvarn.server.parse import Call, call_of, checked
from kvarn.server.protocols.responses.fields import (
    FIELDS,
    FUNCTION,
    INCLUDABLE,
    UNUSED_IN_TOOL,
    USED_IN_TOOL,
)
from kvarn.server.protocols.responses.items import Item, Message, items_of, messages_of
from kvarn.server.protocols.responses.store import Responses, Stored
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json, problem
from kvarn.server.talk import Before, Talk, talk_of

LOGPROBS = "message.output_text.logprobs"
RENAMED = {  # the fields of a chat that a response is translated to, and its own
    "response_format": "text.format",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
NAMES = {r"\bresponse_format\b": "text.format", r"\bmessages\[\d+\]\.tool_calls\b": "input: a call"}  # in messages
AS_IN_CHATS = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "request_id", "cache_salt", "parallel_tool_calls"),
    *("chat_template_kwargs", "prompt_cache_options"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply needs to know of its request."""

    body: Json
    tools: list[Json]  # as the answer lists them
    items: list[Json]
    head: str  # what the beginning of the prompt is made from, besides messages
    conversation: list[Message]  # without instructions


def response_call(raw: bytes, stored: Responses, owner: bytes) -> Call:
    body = checked(raw, FIELDS)
    before = _previous(body, stored, owner)
    items, unused = items_of(body["input"])
    tools, ignored = _tools(body.get("tools", ()))
    ignored = [*of_fields(body, FIELDS), *of_cache_options(body), *_unused(body), *unused, *ignored]
    new = _new(items)
    conversation = ([] if before is None else json.loads(before.messages)) + new
    chat = _as_chat(body, tools, conversation)
    limit = int(body["max_output_tokens"]) if "max_output_tokens" in body else None
    try:
        talk = replace(talk_of(chat), effort_field=RENAMED["reasoning_effort"], continues=False)
        head = _head(body, talk)
        if before is not None:
            talk = replace(talk, before=_before(body, before, head, len(talk.messages) - len(new)))
        call = call_of(chat, _logprobs(body), limit, talk=talk, ignored=ignored)
    except Refusal as refusal:
        raise _renamed(refusal) from None
    asked = Asked(body, _listed_tools(body), [item.body for item in items], head, conversation)
    field = RENAMED.get(call.structure_field, call.structure_field)
    return replace(
        call,
        structure_field=field,
        given={"asked": asked},
        kept=body.get("store", True),
        text_logprobs=True,
        timed=body.get("timings_per_token", False),
        watched=body.get("return_progress", False),
    )


def _previous(body: Json, stored: Responses, owner: bytes) -> Stored | None:
    name = "previous_response_id"
    if name not in body:
        return None
    if (found := stored.get(body[name], owner)) is None:
        message = f"{name}: this key has no such response, or it is no longer stored: send the whole conversation"
        raise Refusal(404, message, name, "previous_response_not_found")
    return found


def _before(body: Json, stored: Stored, head: str, n_messages: int) -> Before:
    changed = "" if head == stored.head else "instructions, tools or settings of the chat template are not the same"
    return Before(body["previous_response_id"], stored.tokens, n_messages, changed)


def _head(body: Json, talk: Talk) -> str:
    return json.dumps([body.get("instructions"), talk.tools.shown, talk.variables, talk.effort])


def _new(items: Sequence[Item]) -> list[Message]:
    """Something to answer, also if a client only wants to see whether the server answers."""
    return messages_of(items) or [{"role": "user", "content": ""}]


def _as_chat(body: Json, tools: list[Json], conversation: list[Message]) -> Json:
    """The same request for /v1/chat/completions."""
    chat = {name: body[name] for name in AS_IN_CHATS if name in body}
    chat["cache_priority"] = priority_of(body)
    chat["messages"] = _with_instructions(body.get("instructions"), conversation)
    if tools:
        chat["tools"] = tools
    if "tool_choice" in body:
        chat["tool_choice"] = _choice(body["tool_choice"])
    if (format := body.get("text", {}).get("format")) is not None:
        chat["response_format"] = _format(format)
    if (effort := body.get("reasoning", {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _with_instructions(instructions: str | None, conversation: list[Message]) -> list[Message]:
    """One system message at the beginning: instructions and the first system messages. Many chat templates refuse
    more."""
    texts = [] if instructions is None else [instructions]
    n = 0
    while n < len(conversation) and conversation[n]["role"] in ("system", "developer"):
        texts.append(conversation[n]["content"])
        n += 1
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return system + conversation[n:]


def _tools(given: Sequence[Json]) -> tuple[list[Json], list[Ignored]]:
    """The functions in the form of chats, and what has no effect."""
    functions: list[Json] = []
    ignored: list[Ignored] = []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if tool["type"] != "function":
            ignored.append(named("tools", tool["type"], TOOL_TYPES, f"{where} ({shown(tool['type'])})"))
            continue
        if wrong := problem(tool, FUNCTION, where):
            raise Refusal(400, wrong.message, "tools", logged=wrong.unquoted)
        function = {key: tool[key] for key in USED_IN_TOOL[1:] if tool.get(key) is not None}
        functions.append({"type": "function", "function": function})
        ignored += others("tools", tool, (*USED_IN_TOOL, *HINTS), UNUSED_IN_TOOL, where)
    return functions, ignored


def _listed_tools(body: Json) -> list[Json]:
    """As the answer lists them: a function has all its fields."""
    whole = {"description": None, "parameters": None, "strict": False}
    return [whole | tool if tool["type"] == "function" else tool for tool in body.get("tools", ())]


def _choice(given: Any) -> Any:
    if isinstance(given, str):
        return given
    kind = given.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind == "allowed_tools" and isinstance(given.get("tools"), list):
        tools = [_choice(each) if isinstance(each, dict) else each for each in given["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": tools}}
    message = (
        'tool_choice must be none, auto, required, {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )
    raise Refusal(400, message, "tool_choice")


def _format(given: Json) -> Json:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _logprobs(body: Json) -> int | None:
    if not (body.get("top_logprobs") or LOGPROBS in body.get("include", ())):
        return None
    if body.get("tools"):
        message = "top_logprobs with tools is not implemented: leave out tools, or top_logprobs and include"
        raise Refusal(400, message, "top_logprobs", "unsupported_parameter")
    return int(body.get("top_logprobs", 0))


def _unused(body: Json) -> list[Ignored]:
    """What parts of the fields have no effect."""
    found = []
    for i, each in enumerate(body.get("include", ())):
        if each != LOGPROBS:
            found.append(named("include", each, INCLUDABLE, f"include[{i}] ({shown(each)})"))
    if body.get("text", {}).get("verbosity") not in (None, "medium"):
        found.append(Ignored("verbosity", "text.verbosity"))
    reasoning = {key: value for key, value in body.get("reasoning", {}).items() if value is not None}
    found += others("reasoning", reasoning, ("effort",), ("summary", "generate_summary"), "reasoning")
    if body.get("truncation") == "auto":
        found.append(Ignored("truncation", "truncation"))
    if body.get("stream_options", {}).get("include_obfuscation"):
        found.append(Ignored("stream_options", "stream_options.include_obfuscation"))
    return found


def _renamed(refusal: Refusal) -> Refusal:
    """The refusal with the names that the fields have here."""
    message, logged, param = str(refusal), refusal.logged, refusal.param
    for name, own in NAMES.items():
        message, logged = re.sub(name, own, message), re.sub(name, own, logged)
    param = RENAMED.get(param or "", param)
    return Refusal(refusal.status, message, param, refusal.code, refusal.retry_after, logged)
