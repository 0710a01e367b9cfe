"""The reader of an answer: its parts do not depend on how the text was cut, and reasoning is counted in tokens."""

import pytest

from kvarn.chats.answer import Reader
from kvarn.dialect import Dialect, Parser, Tool

HERMES = Dialect("hermes", call=("<tool_call>\n", "\n</tool_call>"), reasoning=("<think>\n", "\n</think>\n\n"))
TOOLS = [Tool("f", "", {"type": "object"})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
TEXTS = {
    "text": "A <b>text</b>.",
    "call": CALL,
    "all": f"<think>\nHm.\n</think>\n\nI ask.\n{CALL}\n{CALL}",
    "cut": CALL[:-20],
    "unknown": CALL.replace('"f"', '"g"'),
    "broken": CALL.replace('"<b>"', "b"),
    "never closed": "<think>\nHm, <b>",
}


def read(*pieces: str) -> tuple:
    """All but the ids of calls, which are new each time."""
    reader = Reader(Parser(HERMES, TOOLS), "</think>", ())
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    calls = [(call.name, call.arguments) for call in reader.calls]
    ends = list(range(1, sum(map(len, pieces)) + 1))  # one token per character
    return reader.content, reader.reasoning, calls, reader.error, reader.n_reasoning(ends)


@pytest.mark.parametrize("name", TEXTS)
def test_every_cut_gives_the_same_parts(name: str) -> None:
    text = TEXTS[name]
    whole = read(text)
    assert read(*text) == whole
    for at in range(1, len(text)):
        assert read(text[:at], text[at:]) == whole, at


def test_the_parts() -> None:
    argued = ("f", '{"a": "<b>"}')
    assert read(TEXTS["all"]) == ("I ask.", "Hm.", [argued, argued], None, len("<think>\nHm.\n</think>"))
    assert read(TEXTS["never closed"]) == ("", "Hm, <b>", [], None, len(TEXTS["never closed"]))
    for name in ("cut", "unknown", "broken"):
        content, _, calls, error, _ = read(TEXTS[name])
        assert (content, calls) == (TEXTS[name], [])
        assert error


def test_names_of_control_tokens_are_never_content() -> None:
    reader = Reader(Parser(HERMES, TOOLS), "</think>", ("</tool_call>",))
    reader.push("It is</tool_call> fine.")
    reader.finish()
    assert reader.content == "It is fine."


def test_the_reason_of_the_end() -> None:
    reader = Reader(Parser(HERMES, TOOLS))
    assert reader.finish_reason("stop") == "stop"
    reader.push(CALL)
    assert (reader.finish_reason("stop"), reader.finish_reason("length")) == ("tool_calls", "length")
