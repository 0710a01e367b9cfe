"""The state of a sample: a function of its tokens, and a structure that begins after a marker."""

import random
import threading

import numpy as np
import pytest
from support.structures import compiler, tokenizer, verdict

from kvarn.errors import KvarnError
from kvarn.structured import choice_of, grammar_of, regex_of, schema_of, state

OBJECT = schema_of({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
CLOSED = {"additionalProperties": False}
END = "</think>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('So </think>{"a":true}', "complete"),
        ('So </think>\n\n{"a":true}', "complete"),
        ('So </think>\n \n{"a": true}', "complete"),
        ('</think>{"a":true}', "complete"),
        ("So </thin", "open"),
        ("So </think>", "open"),
        ("So <</</think>\nSo", "So <</</think>\n"),
        ("So </think>\n\n<|im_end|>", "So </think>\n\n"),
        ("So <|im_end|>", "So "),
        ("So <|tool|> and", "open"),
        ("So </think>" + "\n " * 5, "So </think>" + "\n " * 4),
    ],
)
def test_a_structure_begins_after_a_marker(text: str, expected: str) -> None:
    assert verdict(OBJECT, text, after=END) == expected


@pytest.mark.parametrize("begun", ["", "<", "</", "</th", "</thin"])
def test_no_token_with_the_end_of_the_marker_brings_more_than_white_space(begun: str) -> None:
    """The vocabulary has the tokens `>{` and `think>`."""
    state = compiler().compile(OBJECT).start(END)
    output = [tokenizer().encode(character, bos=False)[0] for character in "So " + begun]
    scores = np.zeros(tokenizer().vocab_size)
    state.mask(scores, output)
    for token in range(tokenizer().vocab_size):
        rest = (begun.encode() + tokenizer().token_bytes(token)).partition(END.encode())[2]
        banned = bool(rest.strip()) or token in tokenizer().eos_ids
        assert np.isneginf(scores[token]) == banned, tokenizer().token_bytes(token)


def test_white_space_after_the_marker_belongs_to_a_structure_that_takes_it() -> None:
    lines = grammar_of(r'start: "\n" "x"')
    assert verdict(lines, "a</think>\nx", after=END) == "complete"
    assert verdict(lines, "a</think>x", after=END) == "a</think>"
    assert verdict(regex_of("x"), "a</think>\nx", after=END) == "complete"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":true}', "complete"),
        ('\n{"a":true}', "complete"),
        ('<think>So {</think>\n{"a":true}', "complete"),
        ('\n<think>So</think>{"a":true}', "complete"),
        ("<think></think>", "open"),
        ("<thin", "open"),
        ("So", ""),
        ("<thing", "<thin"),
        ("<think>So <|im_end|>", "<think>So "),
        ('{"a":true', "open"),
        ('<think>So</think>{"b"', '<think>So</think>{"'),
        ("{<think>", "{"),
    ],
)
def test_an_answer_may_begin_with_reasoning_or_with_the_structure(text: str, expected: str) -> None:
    required = schema_of({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | CLOSED)
    assert verdict(required, text, after=END, begin="<think>") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool>x", "complete"),
        ("<think>a</think><tool>x", "complete"),
        ("<t", "open"),
        ("<to", "open"),
        ("<think>a</think><think>", "<think>a</think><"),
        ("<tx", "<t"),
        ("<tool>y", "<tool>"),
    ],
)
def test_a_structure_and_reasoning_may_begin_with_the_same_text(text: str, expected: str) -> None:
    assert verdict(grammar_of('start: "<tool>" "x"'), text, after=END, begin="<think>") == expected


def test_an_empty_marker_is_refused() -> None:
    for texts in (("", None), (END, "")):
        with pytest.raises(KvarnError, match="empty"):
            compiler().compile(OBJECT).start(*texts)


@pytest.mark.parametrize(("after", "begin"), [(None, None), (END, None), (END, "<think>")])
def test_the_state_is_a_function_of_the_tokens(after: str | None, begin: str | None) -> None:
    """Any order of questions gives the masks that a new state gives."""
    compiled, rng = compiler().compile(OBJECT), random.Random(1)
    text = '{"a": true, "bcd": [1, 2]}'
    tokens = tokenizer().encode(text if after is None else f"{begin or ''}So {END}\n{text}", bos=False)
    kept = compiled.start(after, begin)
    for _ in range(60):
        output = tokens[: rng.randrange(len(tokens) + 1)]
        asked, expected = np.zeros((2, tokenizer().vocab_size))
        done = compiled.start(after, begin).complete(output)
        assert kept.complete(output) == done == (len(output) == len(tokens))
        kept.mask(asked, output)  # of another thread
        compiled.start(after, begin).mask(expected, output)
        assert (asked == expected).all()


def test_the_next_mask_is_computed_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, once, between two questions. A forked process, which has no such thread, makes its own."""
    threads, compute = [], state._threads.bitmask

    def noted(matcher):
        coming = compute(matcher)
        coming.add_done_callback(lambda _: threads.append(threading.current_thread().name))
        coming.result()
        return coming

    monkeypatch.setattr(state._threads, "bitmask", noted)
    tokens = tokenizer().encode('{"a": true', bos=False)
    following, scores = compiler().compile(OBJECT).start(), np.zeros(tokenizer().vocab_size)
    for n in range(1, len(tokens) + 1):
        if n == 2:
            state._threads.forget()
        assert not following.complete(tokens[:n])
        following.mask(scores, tokens[:n])
    assert len(threads) == len(tokens)


def test_a_token_that_was_forbidden_fails_the_request() -> None:
    """Every time that it is asked."""
    sample = compiler().compile(choice_of(["a", "b"])).start()
    for _ in range(2):
        with pytest.raises(KvarnError, match="cannot be followed further"):
            sample.mask(np.zeros(tokenizer().vocab_size), tokenizer().encode("c", bos=False))
        with pytest.raises(KvarnError, match="cannot be followed further"):
            sample.complete(tokenizer().encode("c", bos=False))


def test_a_model_has_fewer_or_more_rows_than_the_tokenizer_has_tokens() -> None:
    for n in (100, tokenizer().vocab_size):
        for after in (None, END):
            scores = np.zeros(n)
            compiler().compile(OBJECT).start(after).mask(scores, [])
            assert np.isfinite(scores).any()
