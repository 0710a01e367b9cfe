"""Streaming gives whole characters and, joined, exactly what decode gives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hard_texts import hard_texts
from support.vocabularies import bpe, spm

from kvarn.text.detokenizer import Detokenizer
from kvarn.text.tokenizer import Tokenizer

WORDS = {"▁": -1, "a": -1, "▁a": -2, "▁▁": -3, "é": -1, "b": -1}
TOKENIZERS = {
    "spm": Tokenizer.from_gguf(spm(WORDS, user_defined=("\n\n",))),
    "spm without prefix": Tokenizer.from_gguf(spm(WORDS, user_defined=("\n\n",), add_space_prefix=False)),
    "bpe": Tokenizer.from_gguf(bpe(("a b", "Ã ©", "Ġ a"), control=("<s>", "</s>"), bos_token_id=260, pre="qwen2")),
}
EACH = pytest.mark.parametrize("name", TOKENIZERS)


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@EACH
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_stream_to_what_decode_gives(name: str, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    special = data.draw(st.booleans())
    assert "".join(streamed(Detokenizer(tokenizer, special=special), ids)) == tokenizer.decode(ids, special=special)


@EACH
def test_no_string_ends_within_a_character(name: str) -> None:
    for text in hard_texts(seed=2, count=300):
        parts = streamed(Detokenizer(TOKENIZERS[name]), TOKENIZERS[name].encode(text))
        assert "".join(parts) == text
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(parts)
        assert parts[-1] == ""


def test_bytes_wait_for_their_character() -> None:
    tokenizer = TOKENIZERS["spm"]
    assert streamed(Detokenizer(tokenizer), tokenizer.encode("🦙", bos=False)) == ["", "", "", "", "🦙", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = tokenizer.encode("a🦙", bos=False)[:-1]
    assert streamed(Detokenizer(tokenizer), ids) == ["a", "", "", "", "\ufffd"]


def test_the_space_before_text_is_taken_away_at_the_start_and_after_special_tokens() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = tokenizer.encode("a</s> a", bos=True, special=True)
    assert "".join(streamed(Detokenizer(tokenizer), ids)) == "a a"
    assert "".join(streamed(Detokenizer(tokenizer, special=True), ids)) == "<s>a</s> a"


def test_what_continues_a_prompt_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["spm"]
    prompt, more = tokenizer.encode("b"), tokenizer.encode("a", bos=False)
    assert "".join(streamed(Detokenizer(tokenizer, after=prompt), more)) == " a"
    assert "".join(streamed(Detokenizer(tokenizer, after=prompt[:1]), more)) == "a"
    assert "".join(streamed(Detokenizer(tokenizer), more)) == "a"
