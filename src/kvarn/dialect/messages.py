"""Conversations with tools, as templates expect them.

A template that knows tools gets them, and the arguments of earlier calls as objects or as text. For a model without a
format of its own, tools become instructions in the system message, and calls and results become text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.dialect.derive import as_fields
from kvarn.dialect.dialect import Dialect, Tool
from kvarn.errors import KvarnError

Message = Mapping[str, Any]
_INSTRUCTIONS = """You can call tools. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>
The result comes in the next message. If no tool helps, answer with text."""


def for_template(
    dialect: Dialect, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages of OpenAI's API and their tools, as the template's `messages` and `tools`."""
    if dialect.origin == "generic":
        return _plain(messages, tools), None
    return [_with_arguments(message, dialect.arguments_as_text) for message in messages], as_fields(tools) or None


def instructions(tools: Sequence[Tool]) -> str:
    lines = (
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools
    )
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(line, ensure_ascii=False) for line in lines))


def _with_arguments(message: Message, as_text: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            arguments = _object(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise KvarnError(f"the arguments of a tool call in the messages are not a JSON object: {text[:60]!r}")
    return value


def _plain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            text = f"<tool_response>\n{_text(content)}\n</tool_response>"
            if result and result[-1].get("tool_results"):  # one message: some templates want turns to alternate
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text, "tool_results": True})
        elif calls := message.get("tool_calls"):
            written = "\n".join(map(_written, calls))
            text = f"{_text(content)}\n{written}" if content else written
            result.append({"role": role, "content": text})
        else:
            result.append(dict(message))
    for message in result:
        message.pop("tool_results", None)
    if not tools:
        return result
    if result and result[0].get("role") == "system":
        result[0]["content"] = f"{_text(result[0]['content'])}\n\n{instructions(tools)}"
        return result
    return [{"role": "system", "content": instructions(tools)}, *result]


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    value = _object(arguments) if isinstance(arguments, str) else arguments
    text = json.dumps({"name": function["name"], "arguments": value}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def _text(content: Any) -> str:
    """The text of a message, also if it is given in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)
