"""The parser: what it finds in every dialect, and that it finds the same however the text is cut."""

import json
import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dialect_samples import DIALECTS, SAMPLES, TOOLS, said

from kvarn.dialect import (
    GENERIC,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Dialect,
    Malformed,
    Parser,
    Reasoning,
    joined,
)

THINKING = replace(GENERIC, reasoning=("<think>\n", "\n</think>\n\n"))


def parsed(dialect: Dialect, pieces: list[str], opened: bool = False, tools=TOOLS) -> list[Delta]:
    ids = count()
    parser = Parser(dialect, tools, opened, new_id=lambda: f"id{next(ids)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    assert parser.finish() == []
    return joined(deltas)


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES)
def test_what_an_answer_says(name: str, text: str, expected: list) -> None:
    assert said(parsed(DIALECTS[name], [text])) == expected


@pytest.mark.parametrize(("name", "text"), [sample[:2] for sample in SAMPLES])
def test_cuts_change_nothing(name: str, text: str) -> None:
    whole = parsed(DIALECTS[name], [text])
    assert parsed(DIALECTS[name], list(text)) == whole
    for at in range(len(text) + 1):
        assert parsed(DIALECTS[name], [text[:at], text[at:]]) == whole
    dice = random.Random(text)
    for _ in range(20):
        cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(2, 9)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(DIALECTS[name], pieces) == whole


@pytest.mark.parametrize(("name", "text"), [sample[:2] for sample in SAMPLES])
def test_no_beginning_of_an_answer_makes_half_a_call(name: str, text: str) -> None:
    """Whatever is cut off: a call is complete or told as malformed, and what is complete has valid arguments."""
    for end in range(len(text)):
        deltas = parsed(DIALECTS[name], [text[:end]])
        said(deltas)  # parses the arguments of complete calls
        for broken in [delta.index for delta in deltas if isinstance(delta, CallEnd) and not delta.complete]:
            text = "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == broken)
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)
        begun = [delta.index for delta in deltas if isinstance(delta, CallBegin)]
        ended = [delta.index for delta in deltas if isinstance(delta, CallEnd)]
        broken = [delta.index for delta in deltas if isinstance(delta, CallEnd) and not delta.complete]
        assert begun == ended
        assert broken == [delta.index for delta in deltas if isinstance(delta, Malformed) and delta.index is not None]


@pytest.mark.parametrize("name", DIALECTS)
@settings(deadline=None)
@given(data=st.data())
def test_random_markers_never_fail(name: str, data: st.DataObject) -> None:
    dialect = DIALECTS[name]
    words = [
        *dialect.markers,
        *(m.strip() for m in dialect.markers),
        "weather",
        "time",
        '{"name": "time"}',
        '{"city": "x"}',
    ]
    words += ['"', "{", "}", "[", "]", "(", ")", "=", ",", ":", "\\", "\n", " ", "a", "<", ">", "1", "'"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    whole = parsed(dialect, [text])
    said(whole)
    assert parsed(dialect, list(text)) == whole
    at = data.draw(st.integers(0, len(text)))
    assert parsed(dialect, [text[:at], text[at:]]) == whole


def test_arguments_come_while_they_are_written() -> None:
    parser = Parser(GENERIC, TOOLS, new_id=lambda: "id")
    assert parser.push('Hm <tool_call>{"name": "weather", ') == [Content("Hm")]
    assert parser.push('"arguments": {"city": "Os') == [
        CallBegin(0, "id", "weather"),
        *[CallArguments(0, text) for text in ("{", '"', "city", '"', ":", " ", '"', "Os")],
    ]
    assert joined(parser.push("lo\\")) == [CallArguments(0, "lo")]
    assert joined(parser.push('n"}}')) == [CallArguments(0, '\\n"')]
    assert parser.push("</tool_call>") == [CallArguments(0, "}"), CallEnd(0)]
    assert parser.finish() == []


def test_an_answer_in_json_is_not_held_back() -> None:
    for name in ("hermes", "llama3"):
        parser = Parser(DIALECTS[name], TOOLS)
        assert parser.push('{"answ') == []
        assert joined(parser.push('er": "a')) == [Content('{"answer": "a')]
        assert joined(parser.push("b")) == [Content("b")]


def test_a_strict_tool_is_called_with_a_marker_only() -> None:
    tools = [replace(tool, strict=True) for tool in TOOLS]
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    error = "the model called the strict function 'weather' without '<tool_call>'"
    for text in (call, f"```json\n{call}\n```"):
        assert parsed(GENERIC, [text], tools=tools) == [Malformed(text, error)]
    assert said(parsed(DIALECTS["llama3"], [call], tools=tools)) == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize("between", ["\n", "\n\n", " ", ", ", "; ", "\n```\n```json\n", "\n```\n\n```\n", ""])
def test_several_calls_without_markers(between: str) -> None:
    one, two = '{"name": "weather", "arguments": {"city": "Oslo"}}', '{"name": "time", "arguments": {}}'
    fence = "```" in between
    calls = between.join((one, two, two))
    text = f"```json\n{calls}\n```" if fence else calls
    found = [("weather", {"city": "Oslo"}), ("time", {}), ("time", {})]
    assert said(parsed(GENERIC, [text])) == found
    assert said(parsed(GENERIC, list(f"{text}\nBye."))) == [*found, ("say", "Bye.")]


@pytest.mark.parametrize(
    "rest", ['{"a": 1}', "```python\nx\n```", "`a`", "{", '{"name": "other"}', "```json\n[1]\n```"]
)
def test_what_follows_calls_without_markers_may_be_text(rest: str) -> None:
    text = '{"name": "time", "arguments": {}}\n' + rest
    assert said(parsed(GENERIC, [text])) == [("time", {}), ("say", rest)]
    assert parsed(GENERIC, list(text)) == parsed(GENERIC, [text])


def test_a_marker_that_is_cut_off_is_reported() -> None:
    cut = Malformed("<tool_", "the text ends inside the marker of a call")
    assert parsed(GENERIC, ["Hm. <tool_"]) == [Content("Hm. "), cut]
    assert parsed(GENERIC, ["a < b <t"]) == [Content("a < b <t")]


def test_a_text_argument_in_tags_comes_while_it_is_written() -> None:
    parser = Parser(DIALECTS["qwen3-coder"], TOOLS, new_id=lambda: "id")
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert joined(parser.push("one\n")) == [CallArguments(0, "one")]
    assert joined(parser.push("two</par")) == [CallArguments(0, "\\ntwo")]


def test_a_call_with_text_after_its_arguments_is_not_complete() -> None:
    deltas = parsed(GENERIC, ['<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}}</tool_call>'])
    assert deltas[1] == CallArguments(0, '{"city": "Oslo"')
    assert deltas[3] == CallEnd(0, complete=False)


def test_a_malformed_call_has_all_its_text() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": 1 2}}</tool_call>'
    begin, arguments, malformed, end, after = parsed(GENERIC, [f"{broken} ok"])
    assert begin == CallBegin(0, "id0", "weather")
    assert arguments == CallArguments(0, '{"city": 1 ')
    assert malformed == Malformed(broken, "',' is missing", 0)
    assert end == CallEnd(0, complete=False)
    assert after == Content("ok")


def test_a_call_after_a_malformed_one_has_the_next_index() -> None:
    text = '<tool_call>{"name": "no"}</tool_call><tool_call>{"name": "time"}</tool_call>'
    deltas = parsed(GENERIC, [text])
    assert isinstance(deltas[0], Malformed)
    assert deltas[0].index is None
    assert deltas[1] == CallBegin(0, "id0", "time")


def test_ids_that_the_model_writes() -> None:
    kimi = "<|tool_call_begin|>functions.time:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert parsed(DIALECTS["kimi"], [kimi])[0] == CallBegin(0, "functions.time:3", "time")
    mistral = "[TOOL_CALLS]time[CALL_ID]abc123XYZ[ARGS]{}"
    assert parsed(DIALECTS["mistral"], [mistral])[0] == CallBegin(0, "abc123XYZ", "time")
    short = "[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}"
    assert parsed(DIALECTS["mistral"], [short])[0] == CallBegin(0, "id0", "time")


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, [Reasoning("hm"), Content("Yes.")]),
        ("\n<think>hm</think>Yes.", False, [Reasoning("hm"), Content("Yes.")]),
        ("hm\n</think>\n\nYes.\n", True, [Reasoning("hm"), Content("Yes.\n")]),
        ("<think>hm</think>", True, [Reasoning("hm")]),
        ("never closed \n", True, [Reasoning("never closed \n")]),
        ("<think>never </thin", False, [Reasoning("never </thin")]),
        ("</think>Yes.", True, [Content("Yes.")]),
        ("Yes <think>no</think>", False, [Content("Yes <think>no</think>")]),
        ("\nYes", False, [Content("\nYes")]),
        ("<tool_call> in thought</think>", True, [Reasoning("<tool_call> in thought")]),
    ],
)
def test_reasoning(text: str, opened: bool, expected: list[Delta]) -> None:
    for tools in (TOOLS, ()):
        assert parsed(THINKING, [text], opened, tools) == expected
        assert parsed(THINKING, list(text), opened, tools) == expected


def test_reasoning_then_a_call() -> None:
    text = '<think>\nhm</think>\n<tool_call>{"name": "time"}</tool_call>'
    assert said(parsed(THINKING, [text])) == [("think", "hm"), ("time", {})]


def test_reasoning_may_come_again_if_its_marker_is_a_control_token() -> None:
    dialect = replace(THINKING, control=(("<think>", 5),))
    assert said(parsed(dialect, ["a <think>b</think> c"])) == [("say", "a"), ("think", "b"), ("say", "c")]


def test_without_tools_there_are_no_calls() -> None:
    for name, text, _ in SAMPLES:
        if name != "harmony":
            assert parsed(DIALECTS[name], [text], tools=()) == ([Content(text)] if text else [])


# -- time and memory -------------------------------------------------------------------------------------------------

LONG = 50_000
LONG_TEXTS = {
    "text": ("hermes", "x" * LONG),
    "beginnings of a marker": ("hermes", "<tool_cal" * (LONG // 9)),
    "white space": ("hermes", "a" + " \n" * (LONG // 2)),
    "a string": ("hermes", f'<tool_call>{{"name": "weather", "arguments": {{"city": "{"x" * LONG}"}}}}'),
    "an open list": ("hermes", '<tool_call>{"name": "weather", "arguments": {"places": ' + "[" * LONG),
    "a number": ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": ' + "1" * LONG),
    "a name": ("mistral", "[TOOL_CALLS]" + "n" * LONG),
    "keys": ("hermes", '<tool_call>{"name": "time"' + ', "k": 1' * (LONG // 8)),
    "value ends": ("qwen3-coder", "<function=weather><parameter=city>" + "</parameter> " * (LONG // 13)),
    "calls": ("hermes", '<tool_call>{"name": "no"}</tool_call>' * (LONG // 37)),
    "reasoning ends": ("gemma4", "<|tool_call>call:weather{city:" + '<|"' * (LONG // 3)),
    "a header": ("harmony", "<|channel|>" + "h" * LONG),
    "python": ("llama4", "[weather(city=" + "[" * LONG),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_work_is_in_proportion_to_the_text(name: str) -> None:
    """Character by character: what is copied stays within a marker's length for each."""
    dialect, text = LONG_TEXTS[name]
    parser = Parser(DIALECTS[dialect], TOOLS)
    n = sum(len(parser.push(c)) for c in text) + len(parser.finish())
    assert n <= 2 * len(text) + 8
    assert parser.work <= 20 * len(text)


def test_a_large_argument_arrives_whole() -> None:
    value = {"city": 'å\n"\\' * 20_000}
    text = f"<tool_call>{json.dumps({'name': 'weather', 'arguments': value})}</tool_call>"
    assert said(parsed(GENERIC, list(text))) == [("weather", value)]
