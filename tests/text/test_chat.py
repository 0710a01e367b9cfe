"""Chat templates: what transformers renders, errors in one line, and a sandbox."""

import re
from datetime import datetime
from typing import Any

import pytest
from support import models

from kvarn.errors import KvarnError
from kvarn.text.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Hi\n there "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye 🦙"},
]
CHATML = (
    '<|im_start|>system\nBe <brief> & "kind".<|im_end|>\n<|im_start|>user\nHi\n there <|im_end|>\n'
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye 🦙<|im_end|>\n<|im_start|>assistant\n"
)
ZEPHYR = (
    '<|system|>\nBe <brief> & "kind".</s>\n<|user|>\nHi\n there </s>\n'
    "<|assistant|>\nHello!</s>\n<|user|>\nBye 🦙</s>\n<|assistant|>\n"
)


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(MESSAGES, **variables)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", CHATML),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", CHATML),
        ("tinyllama-1.1b-chat-iq2_xxs.gguf", ZEPHYR),
    ],
)
def test_templates_of_real_models(file: str, expected: str) -> None:
    """The same strings as llama.cpp's /apply-template gives."""
    tokenizer = models.tokenizer(models.model(file))
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    assert template.render(MESSAGES) == expected
    assert template.render(MESSAGES, add_generation_prompt=False) == re.sub(r"<\|[^<]*assistant[^<]*\n$", "", expected)


def test_a_template_that_writes_bos_does_not_double_it() -> None:
    tokenizer = models.tokenizer(models.material("data/tokenizer/ggml-vocab-phi-3.gguf"))
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    ids = tokenizer.encode(template.render(MESSAGES[1:]), special=True)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    source = "{% for m in messages %}\n    {% if loop.index == 3 %}{% break %}{% endif %}\n{{ m.role }},\n{% endfor %}"
    assert rendered(source) == "system,\nuser,\n"


def test_variables_are_those_of_transformers() -> None:
    assert rendered("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}") == "<s></s>True"
    assert rendered("{{ tools is none }} {{ documents is none }} {{ x is defined }}") == "True True False"
    assert rendered("{{ tools }} {{ x }}", tools=[1], x="y") == "[1] y"
    assert rendered("{% generation %}a{{ bos_token }}{% endgeneration %}b") == "a<s>b"


def test_tojson_escapes_nothing_for_web_pages() -> None:
    assert rendered("{{ messages[0].content | tojson }}") == r'"Be <brief> & \"kind\"."'
    assert rendered("{{ {'ä': ['<', 1]} | tojson(indent=1) }}") == '{\n "ä": [\n  "<",\n  1\n ]\n}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% if 'a' * 10 ** 12 %}{% endif %}",
        "{{ 'a' | center(10 ** 12) }}",
        "{% set x = '%1000000000000d' % 1 %}{{ ['a'] * 10 ** 12 }}",
    ],
)
def test_nothing_is_computed_before_rendering(source: str) -> None:
    ChatTemplate(source)


def test_templates_can_format_the_date() -> None:
    assert rendered("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "template refused the messages: roles must alternate$"),
        ("{{ nothing.at.all }}", "^the chat template refused the messages: 'nothing' is undefined$"),
        ("{{ 1 / 0 }}", r"^the chat template failed on the messages \(ZeroDivisionError: division by zero\)$"),
        ("{{ messages[0] + 1 }}", r"^the chat template failed on the messages \(TypeError: .*\)$"),
        ("{{ messages.append(1) }}", "refused the messages: access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__' of 'str' .* unsafe"),
        ("{{ raise_exception.__globals__.x }}", "refused the messages: access to attribute '__globals__' .* is unsafe"),
        ("{{ self.__init__.__globals__ }}", "refused the messages: access to attribute '__init__' .* is unsafe"),
        ("{% include 'x' %}", r"the chat template failed on the messages \(TypeError: no loader"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", r"failed on the messages \(OverflowError: Range too big"),
    ],
)
def test_errors_are_one_line_and_the_interpreter_is_out_of_reach(source: str, message: str) -> None:
    with pytest.raises(KvarnError, match=message) as error:
        rendered(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' | format(raise_exception.__globals__) }}",
        "{{ messages | map(attribute='__class__') | join }}",
        "{{ ('' | attr('__class__')) }}",
        "{{ (strftime_now | attr('__code__')) }}",
    ],
)
def test_forbidden_attributes_read_as_undefined(source: str) -> None:
    assert rendered(source) == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "the model has no chat template: use raw completion"),
        ("", "the model has no chat template"),
        ("a\n{% if %}", "the chat template is wrong at line 2: Expected an expression"),
        ("{{ x | nonesuch }}", "the chat template is wrong at line 1: No filter named 'nonesuch'"),
        ("x" * (2 << 20), "the chat template has 2097152 characters; the limit is 1048576"),
        ("{{ " + "(" * 100_000 + " }}", "the chat template"),
    ],
)
def test_a_template_that_cannot_work_is_refused(source: str | None, message: str) -> None:
    with pytest.raises(KvarnError, match=message) as error:
        ChatTemplate(source)
    assert "\n" not in str(error.value)
