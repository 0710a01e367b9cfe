"""Grammars: llguidance accepts what a model writes in every dialect, and refuses what the tools do not allow.

The tokenizer of these tests has a token for each byte, and the control tokens of the dialect.
"""

from dataclasses import replace
from functools import cache, lru_cache

import llguidance
import pytest
from support.dialect_samples import DIALECTS, TOOLS, said
from support.dialect_writer import Calls, written

from kvarn.dialect import Dialect, Parser, Tool, grammar, joined
from kvarn.dialect.grammar import MOST_CALLS
from kvarn.errors import KvarnError

STRICT = tuple(replace(tool, strict=True) for tool in TOOLS)
OSLO: Calls = [
    ("weather", {"city": "Oslo <b>", "days": 3, "units": "C", "wind": True, "places": ["a"], "more": {"note": "n"}})
]
BOTH: Calls = [("weather", {"city": "Oslo"}), ("time", {})]
CONTROL = [
    *("<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>"),
    *(
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "<|python_tag|>",
        "<|tool_call|>",
    ),
]


class Bytes:
    """A token for each byte, then the control tokens, then EOS."""

    def __init__(self, control: list[str]) -> None:
        self.control = control
        self.tokens = [bytes([i]) for i in range(256)] + [b"\xff" + text.encode() for text in (*control, "<eos>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((each for each in self.control if text.startswith(each)), "")
            ids += [256 + self.control.index(token)] if token else list(text[0].encode())
            text = text[len(token) or 1 :]
        return ids


@lru_cache(maxsize=8)
def compiled(lark: str, control: tuple[str, ...]) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(tokenizer(control), llguidance.LLMatcher.grammar_from_lark(lark))


@cache
def tokenizer(control: tuple[str, ...]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(list(control))))


def accepts(lark: str, text: str, control: list[str]) -> str:
    """ "yes", "unfinished", or the text up to where it was refused."""
    matcher = compiled(lark, tuple(control)).deep_copy()
    assert not matcher.get_error(), f"{matcher.get_error()}\n{lark}"
    ids = Bytes(control).encode(text)
    n = matcher.try_consume_tokens(ids)
    if n < len(ids):
        return f"{n} of {len(ids)}"
    return "yes" if matcher.is_accepting() else "unfinished"


def dialects() -> list[Dialect]:
    """Each with its markers as text, and with control tokens where it has some of them."""
    tokens = {text: 256 + i for i, text in enumerate(CONTROL)}
    plain = list(DIALECTS.values())
    return plain + [each for d in plain if (each := d.with_control(tokens)).control]


ALL = pytest.mark.parametrize("dialect", dialects(), ids=lambda d: f"{d.name}{'-control' if d.control else ''}")


SEVERAL = pytest.mark.parametrize(
    "dialect", [d for d in dialects() if d.parallel], ids=lambda d: f"{d.name}{'-control' if d.control else ''}"
)


def control_of(dialect: Dialect) -> list[str]:
    return CONTROL if dialect.control else []


@ALL
@pytest.mark.parametrize("calls", [OSLO, BOTH[:1], BOTH[1:]], ids=["all", "one", "empty"])
def test_what_a_model_writes_is_accepted_and_read_back(dialect: Dialect, calls: Calls) -> None:
    text = written(dialect, calls)
    for required in (True, False):
        lark = grammar(dialect, STRICT, required=required)
        assert accepts(lark, text, control_of(dialect)) == "yes"
    parser = Parser(dialect, TOOLS)
    assert said(joined([*parser.push(text), *parser.finish()])) == calls


@ALL
def test_required_means_a_call_and_nothing_else(dialect: Dialect) -> None:
    lark = grammar(dialect, TOOLS, required=True)
    assert accepts(lark, "", control_of(dialect)) == "unfinished"
    assert accepts(lark, "No.", control_of(dialect)).startswith("0 of")
    for calls in ([("other", {})], [("weather", {})], [("weather", {"city": "x", "days": "many"})]):
        assert accepts(lark, written(dialect, calls), control_of(dialect)) != "yes"


@ALL
def test_only_the_named_tool(dialect: Dialect) -> None:
    lark = grammar(dialect, TOOLS, required=True, only="time")
    assert accepts(lark, written(dialect, BOTH[1:]), control_of(dialect)) == "yes"
    assert accepts(lark, written(dialect, BOTH[:1]), control_of(dialect)) != "yes"


@SEVERAL
def test_several_calls(dialect: Dialect) -> None:
    test_what_a_model_writes_is_accepted_and_read_back(dialect, BOTH)


@SEVERAL
def test_required_calls_come_to_an_end(dialect: Dialect) -> None:
    lark = grammar(dialect, STRICT, required=True)
    assert accepts(lark, written(dialect, BOTH[1:] * MOST_CALLS), control_of(dialect)) == "yes"
    assert accepts(lark, written(dialect, BOTH[1:] * (MOST_CALLS + 1)), control_of(dialect)) != "yes"


@SEVERAL
def test_one_call_if_not_parallel(dialect: Dialect) -> None:
    for required in (True, False):
        lark = grammar(dialect, STRICT, required=required, parallel=False)
        assert accepts(lark, written(dialect, BOTH[:1]), control_of(dialect)) == "yes"
    lark = grammar(dialect, STRICT, required=True, parallel=False)
    assert accepts(lark, written(dialect, BOTH), control_of(dialect)) != "yes"


@ALL
def test_text_is_free_until_a_call_begins(dialect: Dialect) -> None:
    lark = grammar(dialect, STRICT, required=False)
    text = "Hello < [ there.\nBye"
    message = f"<|channel|>final<|message|>{text}" if dialect.form == "harmony" else text
    assert accepts(lark, message, control_of(dialect)) == "yes"
    bad = written(dialect, [("other", {})])
    assert accepts(lark, bad, control_of(dialect)) != "yes"
    if not dialect.bare and dialect.form != "harmony":
        assert accepts(lark, f"{text} {written(dialect, BOTH[:1])}", control_of(dialect)) == "yes"
        assert accepts(lark, f"{text} {bad}", control_of(dialect)) != "yes"


def test_tools_that_are_not_strict_take_any_arguments_in_free_text() -> None:
    for name in ("hermes", "mistral", "qwen3-coder", "gemma4", "lfm2"):
        dialect = DIALECTS[name]
        text = written(dialect, [("weather", {"else": 1})])
        assert accepts(grammar(dialect, TOOLS, required=False), text, []) == "yes"
        assert accepts(grammar(dialect, STRICT, required=False), written(dialect, [("weather", {})]), []) != "yes"


@pytest.mark.parametrize("control", [[], ["<think>", "</think>"]], ids=["text", "control"])
def test_reasoning_comes_first(control: list[str]) -> None:
    dialect = replace(DIALECTS["hermes"], reasoning=("<think>\n", "\n</think>\n\n"))
    dialect = dialect.with_control({text: 256 + i for i, text in enumerate(control)})
    call = written(dialect, BOTH[:1])
    lark = grammar(dialect, TOOLS, required=True)
    assert accepts(lark, f"<think>\nhm <tool_call> x\n</think>\n\n{call}", control) == "yes"
    assert accepts(lark, call, control) == "yes"
    assert accepts(lark, "<think>\nhm", control) == "unfinished"
    assert accepts(lark, "<think>\nhm</think>No", control) != "yes"
    opened = grammar(dialect, TOOLS, required=True, reasoning=False)
    assert accepts(opened, f"\n\n{call}", control) == "yes"
    assert accepts(opened, f"<think></think>{call}", control) != "yes"


def test_messages_before_a_call_of_harmony() -> None:
    dialect = DIALECTS["harmony"]
    call = written(dialect, BOTH[:1])
    lark = grammar(dialect, TOOLS, required=True)
    assert accepts(lark, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call}", []) == "yes"
    assert accepts(lark, "<|channel|>final<|message|>No", []) != "yes"
    opened = grammar(dialect, TOOLS, required=True, reasoning=False)
    assert accepts(opened, f"<|start|>assistant{call}", []) == "yes"


def test_definitions_of_a_schema_hold_in_every_form() -> None:
    schema = {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/point"}},
        "required": ["point"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    tools = [Tool("go", parameters=schema)]
    for name in ("hermes", "mistral", "qwen3-coder", "lfm2"):
        dialect = DIALECTS[name]
        lark = grammar(dialect, tools, required=True)
        assert accepts(lark, written(dialect, [("go", {"point": {"x": 1}})]), []) == "yes"
        assert accepts(lark, written(dialect, [("go", {"point": {"x": "1"}})]), []) != "yes"


def test_optional_arguments_may_be_left_out_in_order() -> None:
    schema = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "required": ["b"]}
    tools = [Tool("go", parameters=schema)]
    for name in ("qwen3-coder", "gemma4", "lfm2"):
        dialect = DIALECTS[name]
        lark = grammar(dialect, tools, required=True)
        for keys in ("b", "ab", "bc", "abc"):
            assert accepts(lark, written(dialect, [("go", dict.fromkeys(keys, 1))]), []) == "yes"
        for keys in ("", "a", "ac", "c"):
            assert accepts(lark, written(dialect, [("go", dict.fromkeys(keys, 1))]), []) != "yes"


@pytest.mark.parametrize("value", ["text", "12", None, 7, [1], "a"])
def test_a_value_of_several_types(value: object) -> None:
    kinds = {"anyOf": [{"type": ["integer", "null"]}, {"type": "string"}, {"$ref": "#/$defs/list"}]}
    some = {"enum": ["a", "text", 7, None, [1]]}
    for schema in (kinds,) if value == "12" else (kinds, some):
        parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"list": {"type": "array"}}}
        tools = [Tool("go", parameters=parameters)]
        for name in ("hermes", "qwen3-coder", "gemma4", "lfm2"):
            dialect = DIALECTS[name]
            text = written(dialect, [("go", {"v": value})])
            assert accepts(grammar(dialect, tools, required=True), text, []) == "yes"
            parser = Parser(dialect, tools)
            read = value if name != "qwen3-coder" or value != "12" else 12  # without quotes they are the same
            assert said(joined([*parser.push(text), *parser.finish()])) == [("go", {"v": read})]


@pytest.mark.parametrize("keyword", ["pattern", "format", "minLength", "not"])
def test_what_tags_cannot_honour_is_refused_by_name(keyword: str) -> None:
    tools = [Tool("go", parameters={"type": "object", "properties": {"a": {"type": "string", keyword: "x"}}})]
    for name in ("qwen3-coder", "gemma4"):
        with pytest.raises(KvarnError, match=f"cannot honour {keyword} in the schema of go"):
            grammar(DIALECTS[name], tools, required=True)
    assert keyword in grammar(DIALECTS["hermes"], tools, required=True)


def test_a_schema_is_not_always_a_schema() -> None:
    for parameters in ({}, {"properties": []}, {"type": "object", "required": ["a"]}, {"properties": {"a": True}}):
        for dialect in DIALECTS.values():
            try:
                assert grammar(dialect, [Tool("go", parameters=parameters)], required=True)
            except KvarnError as error:
                assert "schema of go" in str(error)  # noqa: PT017


def test_names_cannot_break_out_of_the_grammar() -> None:
    tools = [Tool('a"\n| /.*/ #', parameters={"type": "object", "properties": {'k" | /x/': {"type": "integer"}}})]
    for dialect in DIALECTS.values():
        if dialect.form in ("pythonic", "gemma"):
            with pytest.raises(KvarnError, match="an argument with the name 'k"):
                grammar(dialect, tools, required=True)
        else:
            assert accepts(grammar(dialect, tools, required=True), "x", []).startswith("0 of")


def test_a_tool_must_exist() -> None:
    with pytest.raises(KvarnError, match="tool_choice names 'x'"):
        grammar(DIALECTS["hermes"], TOOLS, required=True, only="x")
    with pytest.raises(KvarnError, match="no tools"):
        grammar(DIALECTS["hermes"], [], required=True)
