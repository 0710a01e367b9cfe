"""The fields that only a chat has: its messages, tools and the variables of its template."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarn.chats.chats import check_variables
from kvarn.chats.history import for_template
from kvarn.chats.tools import NO_TOOLS, BadTools, ToolUse, tool_use
from kvarn.errors import KvarnError
from kvarn.server.refusal import Refusal

MOST_VARIABLES = 1 << 14  # characters of chat_template_kwargs as JSON

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Before:
    """An answered conversation that a talk continues."""

    id: str  # of its answer
    tokens: Sequence[int]  # of its prompt and its answer, without the end of the turn
    n_messages: int  # how many of the talk's messages it has, the answer included
    changed: str = ""  # what is not as it was, so that its tokens cannot be continued


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, and what its answer may be."""

    messages: list[Message]
    tools: ToolUse = NO_TOOLS
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    effort: str | None = None  # reasoning_effort
    split: bool = True  # reasoning is not part of the text
    reasoning: bool = True  # the answer has the reasoning
    before: Before | None = None
    effort_field: str = "reasoning_effort"  # the field that has the effort
    continues: bool = False  # the answer continues the text of the last message
    thinks: bool | None = None  # whether the model should reason; None: as it does by default


def talk_of(body: dict[str, Any]) -> Talk:
    functions = [tool for tool in body.get("tools", ()) if tool["type"] == "function"]
    try:
        tools = tool_use(functions, body.get("tool_choice"), body.get("parallel_tool_calls", True))
    except BadTools as error:
        raise Refusal(400, str(error), error.field, logged=f"{error.field} cannot be used") from None
    messages = [_message(message, i) for i, message in enumerate(body["messages"])]
    return Talk(
        messages,
        tools,
        _variables(body.get("chat_template_kwargs", {})),
        body.get("reasoning_effort"),
        body.get("reasoning_format") != "none",
        body.get("include_reasoning", True),
        continues=_continues(body, messages[-1] if messages else {}),
    )


def _continues(body: dict[str, Any], last: Message) -> bool:
    """As in llama.cpp, an answer continues the assistant's message at the end, unless the request says otherwise."""
    asked, opens = body.get("continue_final_message"), body.get("add_generation_prompt")
    name = "continue_final_message"
    if asked and opens:
        raise Refusal(400, f"{name} and add_generation_prompt are both true: give one of them", name)
    text = last.get("role") == "assistant" and not last.get("tool_calls") and (last["content"] or "").strip()
    if asked and not text:
        message = "the last message must be the assistant's, with a text and without tool calls"
        raise Refusal(400, f"{name}: {message}", name)
    return bool(text) and asked is not False and not opens


def check_opening(body: dict[str, Any], talk: Talk) -> Talk:
    """Refuse a prompt that ends after a complete message: no answer begins there."""
    name = "add_generation_prompt"
    if body.get(name) is False and not talk.continues:
        raise Refusal(400, f"{name} is false, and there is no message of the assistant to continue: leave it out", name)
    return talk


def _message(message: Message, i: int) -> Message:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if calls and role != "assistant":
        raise Refusal(400, f"messages[{i}].tool_calls: only an assistant makes calls", "messages")
    if content is None and not (role == "assistant" and (calls or _reasoning(message))):
        raise Refusal(400, f"messages[{i}].content is missing", "messages")
    try:
        for_template([message])
    except KvarnError as error:
        raise Refusal(400, f"messages[{i}].tool_calls: {error}", "messages") from None
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    new = {"role": "system" if role == "developer" else role, "content": content}
    new |= {key: message[key] for key in ("name", "tool_call_id", "tool_calls") if message.get(key)}
    return new | ({"reasoning_content": _reasoning(message)} if _reasoning(message) else {})


def _reasoning(message: Message) -> str | None:
    return message.get("reasoning_content") or message.get("reasoning")


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    name = "chat_template_kwargs"
    try:
        check_variables(given)
    except KvarnError as error:
        raise Refusal(400, str(error), name) from None
    try:
        n = len(json.dumps(given))
    except RecursionError:
        n = MOST_VARIABLES + 1
    if n > MOST_VARIABLES:
        raise Refusal(400, f"{name} is too large: give at most {MOST_VARIABLES} characters of JSON", name)
    return given
