"""Conversations with tools for a model whose template knows no tools: instructions, calls and results become text.

The model is told to write calls as the generic dialect has them: in tags, which the parser can tell from a plain answer
with JSON in it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """You can call tools. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>
The result comes in the next message. If no tool helps, answer with text."""


def instructed(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without calls and results. `tools`: as in OpenAI's API; they become part of the system message."""
    result: list[dict[str, Any]] = []
    results = False  # the last message has results of tools
    for message in messages:
        role, text = message.get("role"), _text(message.get("content"))
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if results:  # one message for all: some templates want turns to alternate
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            result.append({**kept, "content": "\n".join(filter(None, [text, *map(_written, calls)]))})
        else:
            result.append(dict(message))
        results = role == "tool"
    if not tools:
        return result
    told = _INSTRUCTIONS.format(tools="\n".join(map(_line, tools)))
    if result and result[0].get("role") == "system":
        first = {**result[0], "content": f"{_text(result[0].get('content'))}\n\n{told}".lstrip()}
        return [first, *result[1:]]
    return [{"role": "system", "content": told}, *result]


def _line(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return json.dumps(
        {key: function[key] for key in ("name", "description", "parameters") if key in function}, ensure_ascii=False
    )


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or {}
    inside = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {inside}}}\n</tool_call>'


def _text(content: Any) -> str:
    """The text of a message, also if it is given in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)
