"""Conversations with tools for templates without tools."""

import json

from kvarn.dialect import GENERIC, Parser, Tool, instructed, joined

TOOLS = [{"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": {"type": "object"}}}]
CALL = {"id": "x", "type": "function", "function": {"name": "go", "arguments": {"n": "å"}}}


def test_tools_become_part_of_the_system_message() -> None:
    first, user = instructed([{"role": "user", "content": "Hi"}], TOOLS)
    assert first["role"] == "system"
    assert '{"name": "go", "description": "Goes.", "parameters": {"type": "object"}}' in first["content"]
    assert user == {"role": "user", "content": "Hi"}
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]
        one = instructed(messages, TOOLS)
        assert len(one) == 2
        assert one[0]["content"] == f"Be brief.\n\n{first['content']}"
        assert messages[0]["content"] == content


def test_the_example_in_the_instructions_is_what_the_parser_reads() -> None:
    text = instructed([], TOOLS)[0]["content"]
    parser = Parser(GENERIC, [Tool("NAME")], new_id=lambda: "")
    begin = joined([*parser.push(text), *parser.finish()])[1]
    assert begin.name == "NAME"


def test_calls_and_results_become_text() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "Once more.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    call = '<tool_call>\n{"name": "go", "arguments": {"n": "å"}}\n</tool_call>'
    results = [f"<tool_response>\n{n}\n</tool_response>" for n in (1, 2, 3)]
    assert instructed(messages, []) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"{call}\n{call}"},
        {"role": "user", "content": f"{results[0]}\n{results[1]}"},
        {"role": "assistant", "content": f"Once more.\n{call}"},
        {"role": "user", "content": results[2]},
    ]


def test_arguments_may_be_text() -> None:
    text = {**CALL, "function": {"name": "go", "arguments": json.dumps({"n": 1})}}
    (message,) = instructed([{"role": "assistant", "content": "", "tool_calls": [text]}], [])
    assert message["content"] == '<tool_call>\n{"name": "go", "arguments": {"n": 1}}\n</tool_call>'
