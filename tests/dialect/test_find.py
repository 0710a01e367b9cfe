"""Dialects are found from templates: by family, by what the template writes, or the generic one."""

import pytest
from support import chat_templates, dialect_templates
from support.dialect_templates import template

from kvarn.dialect import GENERIC, Parser, find, joined, opens_reasoning
from kvarn.dialect.derive import MOST_FAILURES, NAMES, TOOLS, Rendered, reads
from kvarn.dialect.families import FAMILIES, family_named
from kvarn.errors import KvarnError
from kvarn.text.chat import ChatTemplate

KNOWN = {
    "HERMES": ("hermes", "derived", "json"),
    "QWEN3_CODER": ("qwen3-coder", "derived", "tagged"),
    "GLM": ("glm", "derived", "tagged"),
    "MINIMAX": ("minimax", "derived", "tagged"),
    "LLAMA3": ("llama3", "family", "json"),
    "MISTRAL": ("mistral", "family", "named"),
    "MISTRAL_ARRAY": ("mistral-array", "family", "json"),
    "GEMMA4": ("gemma4", "family", "gemma"),
    "HARMONY": ("harmony", "family", "harmony"),
    "LFM2": ("lfm2", "family", "pythonic"),
    "LLAMA4": ("llama4", "family", "pythonic"),
    "DEEPSEEK": ("deepseek-v3.1", "family", "named"),
    "KIMI": ("kimi", "family", "named"),
    "UNKNOWN_JSON": ("derived", "derived", "json"),
    "UNKNOWN_NAMED": ("derived", "derived", "named"),
    "UNKNOWN_TEXT": ("derived", "derived", "named"),
    "UNKNOWN_ARRAY": ("derived", "derived", "json"),
}


def found(name: str):
    return find(ChatTemplate(getattr(dialect_templates, name)))


@pytest.mark.parametrize("name", KNOWN)
def test_name_origin_and_form(name: str) -> None:
    dialect = found(name)
    assert (dialect.name, dialect.origin, dialect.form) == KNOWN[name]


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("LFM2", "LLAMA4", "KIMI", "HARMONY")])
def test_what_the_template_writes_is_read_back(name: str) -> None:
    dialect = found(name)
    rendered = Rendered(ChatTemplate(getattr(dialect_templates, name)).render)
    assert reads(dialect, rendered.calls(1, dialect.arguments_as_text), 1)
    if dialect.parallel:
        assert reads(dialect, rendered.calls(2, dialect.arguments_as_text), 2)


def test_markers_are_those_of_the_template() -> None:
    hermes = found("HERMES")
    assert hermes.call == ("<tool_call>\n", "\n</tool_call>")
    assert hermes.separator == "\n"
    assert hermes.reasoning == ("<think>\n", "\n</think>\n\n")
    coder = found("QWEN3_CODER")
    assert (coder.section, coder.call) == (("<tool_call>\n", "\n</tool_call>"), ("<function=", "</function>"))
    assert (coder.name_end, coder.key, coder.value) == (">\n", ("<parameter=", ">\n"), ("", "\n</parameter>\n"))
    assert coder.one_per_section
    minimax = found("MINIMAX")
    assert minimax.section == ("<minimax:tool_call>\n", "</minimax:tool_call>")
    assert minimax.call == ('<invoke name="', "</invoke>\n")
    unknown = found("UNKNOWN_JSON")
    assert (unknown.section, unknown.separator) == (("<<calls>>", "<</calls>>"), " | ")
    assert (unknown.name_key, unknown.arguments_key) == ("tool", "input")
    array = found("UNKNOWN_ARRAY")
    assert (array.array, array.call) == (True, ("<do>", "</do>"))


def test_some_templates_want_arguments_as_text() -> None:
    assert found("UNKNOWN_TEXT").arguments_as_text
    assert found("DEEPSEEK").arguments_as_text
    assert not found("HERMES").arguments_as_text


def test_ids_are_as_long_as_the_family_wants() -> None:
    assert len(found("MISTRAL").new_id()) == 9
    assert found("MISTRAL").new_id().isalnum()
    id = found("HERMES").new_id()
    assert id.startswith("call_")
    assert len(id) == 5 + 24


@pytest.mark.parametrize("name", ["CHATML", "LLAMA2", "ZEPHYR", "PHI3", "MISTRAL", "GEMMA"])
def test_a_template_without_tools_is_generic(name: str) -> None:
    assert find(ChatTemplate(getattr(chat_templates, name))) == GENERIC


def test_what_cannot_be_read_back_is_not_taken() -> None:
    numbered = template("{% for c in m.tool_calls %}<c{{ loop.index }}>{{ c | tojson }}</c>{% endfor %}")
    assert find(ChatTemplate(numbered)).origin == "generic"
    with_id = template("{% for c in m.tool_calls %}<c {{ c.id }}>{{ c.function.name }}{}</c>{% endfor %}")
    assert find(ChatTemplate(with_id)).origin == "generic"


def test_a_template_that_fails_is_asked_only_a_few_times() -> None:
    calls = 0

    def fail(*_: object, **__: object) -> str:
        nonlocal calls
        calls += 1
        raise KvarnError("the chat template took more than 5 s")

    assert find(fail, source="tools") == GENERIC
    assert calls <= MOST_FAILURES
    assert find(fail, source="tools <tool_call> <think></think>").name == "hermes"


def test_control_tokens_in_markers_are_known_by_id() -> None:
    tokens = {"<|tool_call>": 7, "<tool_call|>": 8, '<|"|>': 9, "<bos>": 1, "": 3}
    dialect = find(ChatTemplate(dialect_templates.GEMMA4), control=tokens)
    assert dict(dialect.control) == {"<|tool_call>": 7, "<tool_call|>": 8, '<|"|>': 9}


def test_the_end_of_a_turn_is_no_part_of_a_marker() -> None:
    source = template("{% for c in m.tool_calls %}<c>{{ c.function | tojson }}</c>{% endfor %}<|done|>")
    assert find(ChatTemplate(source)).call[1] == "</c>"  # every call has it; the section ends with <|done|>
    assert find(ChatTemplate(source)).section[1] == "<|done|>"
    assert find(ChatTemplate(source), eos=("<|done|>",)).section[1] == ""


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("user says <think>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_opens_reasoning(prompt: str, opened: bool) -> None:
    assert opens_reasoning(found("HERMES"), prompt) is opened
    assert not opens_reasoning(GENERIC, prompt)


def test_families_are_recognized_by_their_own_markers() -> None:
    for family in FAMILIES:
        assert family_named(family.dialect.name) is family.dialect
        assert all("tool" in f"tool {mark}" and mark for mark in family.marks)


def test_the_sentinels_are_found_in_an_answer() -> None:
    parser = Parser(GENERIC, TOOLS, new_id=lambda: "x")
    text = f'<tool_call>{{"name": "{NAMES[0]}"}}</tool_call>'
    assert joined([*parser.push(text), *parser.finish()])[0].name == NAMES[0]
