"""The next turn as a suffix: it is what the template writes after the answer, for any conversation before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support import dialect_templates
from support.chat_templates import CONTROL, ODD, PUBLISHED

from kvarn.chats.continuation import Suffix, suffix
from kvarn.chats.history import for_template
from kvarn.text.chat import ChatTemplate

ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|call|>")
TOOL_CONTROL = (*CONTROL, "</s>", "<|start|>", "<|end|>", "<|call|>", "<|message|>", "<|channel|>")
HISTORY = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What is it?"},
]
NEXT = [{"role": "user", "content": "And now?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"}
WITH_CALLS = {
    name.lower(): source
    for name, source in vars(dialect_templates).items()
    if name.isupper() and not name.startswith("_") and isinstance(source, str) and "messages" in source
}

SILENT = ("lfm2", "llama4")  # they write no calls


def rendered(source: str, messages: Sequence[Mapping[str, Any]], objects: bool = True) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(for_template(messages, objects))


def found(source: str, answer: dict, new: Sequence[dict], objects: bool = True) -> Suffix | None:
    return suffix(lambda messages: (rendered(source, messages, objects), {}), answer, new, ENDS, TOOL_CONTROL)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_suffix_is_what_comes_after_the_answer(name: str) -> None:
    answer = {"role": "assistant", "content": "It is late."}
    whole = rendered(PUBLISHED[name], [*HISTORY, answer, *NEXT])
    made = found(PUBLISHED[name], answer, NEXT)
    assert made is not None
    before = whole.removesuffix(made.text)
    assert before != whole
    assert before.rstrip(" ").endswith("It is late.")
    assert made.prompt.endswith(made.text)


@pytest.mark.parametrize("name", ODD)
def test_a_suffix_of_an_odd_template_is_right_or_there_is_none(name: str) -> None:
    answer = {"role": "assistant", "content": "It is late."}
    made = found(ODD[name], answer, NEXT)
    assert (made is None) == (name in ("joined", "representation", "reverses", "cuts"))
    if made is not None:
        assert rendered(ODD[name], [*HISTORY, answer, *NEXT]).endswith(made.text)


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if name not in SILENT])
def test_a_suffix_after_calls_begins_with_the_end_of_their_turn(name: str) -> None:
    objects = name != "unknown_text"
    whole = rendered(WITH_CALLS[name], [*HISTORY, CALLED, RESULT, *NEXT], objects)
    made = found(WITH_CALLS[name], CALLED, [RESULT, *NEXT], objects)
    assert made is not None
    before = whole.removesuffix(made.text)
    assert before != whole
    assert "Oslo" in before
    assert "Oslo" not in made.text
    assert "sunny" in made.text
    assert "sunny" not in before
    assert made.text.startswith(ENDS)


@pytest.mark.parametrize("name", SILENT)
def test_there_is_no_suffix_after_calls_that_the_template_does_not_write(name: str) -> None:
    assert found(WITH_CALLS[name], CALLED, [RESULT, *NEXT]) is None


def test_a_template_that_rewrites_earlier_turns_has_the_same_suffix() -> None:
    """Reasoning before the last question is dropped: the whole text changes, the suffix does not."""
    source = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
    answer = {"role": "assistant", "content": "Late.", "reasoning_content": "A clock."}
    made = found(source, answer, NEXT)
    assert made is not None
    assert made.text == "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant"


def test_an_end_in_the_new_message_is_not_taken_for_that_of_the_answer() -> None:
    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|im_end|>{% endif %}{% endfor %}"
    assert found(source, {"role": "assistant", "content": "Late."}, NEXT) is None
    assert found(source, CALLED, [RESULT, *NEXT]) is None
