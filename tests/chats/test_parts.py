"""Which part of a prompt is whose, for templates of many families."""

from typing import Any

import pytest
from support import chat_templates, dialect_templates, tiny_gguf

from kvarn.chats.chats import Chats
from kvarn.chats.parts import Part, Parts, parts_of
from kvarn.chats.tools import tool_use
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quoting, restored
from kvarn.text.tokenizer import Tokenizer

LOOK = {
    "type": "object",
    "properties": {"at": {"type": "string", "description": "the place"}},
    "additionalProperties": 0,
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks around", "parameters": LOOK}}]
SYSTEM = {"role": "system", "content": "Rules <|im_end|> first. "}
TALK = [
    SYSTEM,
    {"role": "user", "content": " What do you see?\n"},
    {"role": "assistant", "content": "A boat."},
    {"role": "user", "content": "user, assistant"},
    {"role": "assistant", "content": "Two boats."},
    {"role": "user", "content": "Three?"},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea", "n": 77}'}}
WITH_CALLS = [
    SYSTEM,
    {"role": "user", "content": "What do you see?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "water"},
    {"role": "user", "content": "Three?"},
]
WRITERS = {
    name: template
    for name in dir(dialect_templates)
    if name[0].isalpha()
    and name.isupper()
    and isinstance(template := getattr(dialect_templates, name), str)
    and "messages" in template
}


def chats_of(template: str) -> Chats:
    keys = tiny_gguf.tokenizer_keys(template)
    tokenizer = Tokenizer.from_gguf({name: value for name, (_, value) in keys.items()})
    made = ChatTemplate(template, "<s>", "</s>")
    quotes = Quoting(chat_templates.CONTROL, chat_templates.PLAIN, made.strings)
    return Chats(tokenizer, made, made.render, quotes)


def located(template: str, messages: list[dict], tools: Any = None) -> tuple[str, Parts | None]:
    chats, use = chats_of(template), tool_use(tools)
    prompt = restored(*chats.prompt(messages, use))
    return prompt, parts_of(chats, messages, use, {}, prompt)


@pytest.mark.parametrize("name", chat_templates.PUBLISHED)
def test_each_turn_is_found(name: str) -> None:
    talk = TALK[1:] if name in ("mistral", "gemma") else TALK  # they have no system message
    prompt, parts = located(chat_templates.PUBLISHED[name], talk)
    assert parts is not None
    at = 0
    for i, message in enumerate(talk):
        text = message["content"].strip()
        at = prompt.index(text, at)
        expected = Part("system") if message["role"] == "system" else Part("turn", i, message["role"])
        assert {parts.at(place) for place in range(at, at + len(text) + 1)} == {expected}
        at += len(text)
    assert parts.at(len(prompt) + 1) == Part("template")


@pytest.mark.parametrize("name", WRITERS)
def test_tools_and_calls_are_found(name: str) -> None:
    prompt, parts = located(WRITERS[name], WITH_CALLS, TOOLS)
    assert parts is not None
    for text, expected in (
        ("looks around", Part("tools")),
        ("the place", Part("tools")),
        ("additionalProperties", Part("tools")),
        ("first.", Part("system")),
        ("I look.", Part("turn", 2, "assistant")),
        ("77", Part("turn", 2, "assistant")),
        ("water", Part("turn", 3, "tool")),
        ("Three?", Part("turn", 4, "user")),
    ):
        if text in prompt:
            assert parts.at(prompt.rindex(text)) == expected, text
    assert "Three?" in prompt


@pytest.mark.parametrize("name", chat_templates.ODD)
def test_a_template_that_changes_texts_gives_nothing_wrong(name: str) -> None:
    prompt, parts = located(chat_templates.ODD[name], TALK)
    assert parts is None or parts.text == prompt
    if name in ("reverses", "representation"):
        return
    if parts is not None and "Two boats." in prompt:
        assert parts.at(prompt.index("Two boats.") + 1) == Part("turn", 4, "assistant")


def test_more_messages_than_marks() -> None:
    messages = [{"role": "user", "content": "a"}] * 4096
    chats = chats_of(chat_templates.CHATML)
    assert parts_of(chats, messages, tool_use(None), {}, "") is None
