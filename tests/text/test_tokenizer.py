"""The rules of tokenization, one at a time, on small vocabularies."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.vocabularies import bpe, control_ids, spm

from kvarn.errors import KvarnError
from kvarn.text.tokenizer import Tokenizer


def pieces(metadata: dict[str, Any], text: str, **options: Any) -> list[str]:
    tokenizer = Tokenizer.from_gguf(metadata)
    return [metadata["tokenizer.ggml.tokens"][id] for id in tokenizer.encode(text, bos=False, **options)]


def test_spm_merges_the_best_score_first() -> None:
    words = {"▁": -1, "a": -1, "b": -1, "c": -1, "ab": -3, "bc": -2}
    assert pieces(spm(words), "abc") == ["▁", "a", "bc"]


def test_spm_merges_the_leftmost_of_equals() -> None:
    words = {"▁": -9, "a": -9, "aa": -2}
    assert pieces(spm(words), "aaa") == ["▁", "aa", "a"]


def test_spm_spells_what_it_does_not_know_in_bytes() -> None:
    words = {"▁": -1, "a": -1}
    assert pieces(spm(words), "aé\0") == ["▁", "a", "<0xC3>", "<0xA9>", "<0x00>"]


def test_spm_without_byte_tokens_uses_the_unknown_token() -> None:
    assert pieces(spm({"▁": -1}, byte_tokens=False), "é") == ["▁", "<unk>", "<unk>"]


def test_spm_puts_a_space_before_text_and_after_special_tokens() -> None:
    words = {"▁": -1, "a": -1, "▁a": -0.5}
    assert pieces(spm(words), "a</s>a", special=True) == ["▁a", "</s>", "▁a"]
    assert pieces(spm(words, add_space_prefix=False), "a</s>a", special=True) == ["a", "</s>", "a"]


def test_user_defined_tokens_are_matched_without_being_asked_for() -> None:
    words = {"▁": -1, "\n": -1, "x": -1}
    metadata = spm(words, user_defined=("\n\n", "\n\n\n"), add_space_prefix=False)
    assert pieces(metadata, "x\n\n\n\n\nx") == ["x", "\n\n\n", "\n\n", "x"]


def test_the_longest_special_token_wins_wherever_it_begins() -> None:
    metadata = spm({"a": -1, "b": -1, "c": -1, "d": -1}, user_defined=("ab", "bcd"), add_space_prefix=False)
    assert pieces(metadata, "abcd") == ["a", "bcd"]


def test_phi3_swallows_white_space_after_special_tokens() -> None:
    metadata = spm({"▁": -1, "a": -1}) | {"general.name": "Phi3"}
    assert pieces(metadata, "</s> \n a<s> a", special=True) == ["</s>", "▁", "a", "<s>", "▁", "▁", "a"]


@pytest.mark.parametrize("metadata", [spm({"▁": -1}), bpe(control=("<s>",), bos_token_id=0)], ids=["spm", "bpe"])
def test_control_tokens_are_recognized_only_on_request(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert not control_ids(tokenizer) & set(tokenizer.encode("a<s>b", bos=False))
    assert control_ids(tokenizer) & set(tokenizer.encode("a<s>b", bos=False, special=True))
    assert tokenizer.decode(tokenizer.encode("a<s>b")) == "a<s>b"
    assert tokenizer.decode(tokenizer.encode("a<s>b", special=True)) == "ab"
    assert tokenizer.decode(tokenizer.encode("a<s>b", bos=False, special=True), special=True) == "a<s>b"


def test_bos_is_added_as_the_model_says_and_never_doubled() -> None:
    adds = Tokenizer.from_gguf(spm({"▁": -1}))
    assert (adds.add_bos, adds.bos_id, adds.bos_token) == (True, 1, "<s>")
    assert adds.encode("")[:1] == [1]
    assert adds.encode("x", bos=False)[0] != 1
    assert adds.encode("<s>x", special=True).count(1) == 1
    assert adds.encode("<s>x").count(1) == 1  # the text's own is plain text
    silent = Tokenizer.from_gguf(spm({"▁": -1}, add_bos_token=False))
    assert not silent.add_bos
    assert silent.encode("x")[0] != 1
    assert silent.encode("x", bos=True)[0] == 1
    assert Tokenizer.from_gguf(bpe(control=("<s>",), pre="llama-bpe", bos_token_id=256)).add_bos
    assert not Tokenizer.from_gguf(bpe(control=("<s>",), bos_token_id=256)).add_bos


def test_every_token_that_ends_a_turn_is_known() -> None:
    tokenizer = Tokenizer.from_gguf(
        bpe(control=("<s>", "<|end|>", "<|im_end|>", "<x>", "<y>"), eos_token_id=259, eot_token_id=260)
    )
    assert tokenizer.eos_ids == (259, 260, 258, 257)
    assert tokenizer.eos_token == "<x>"
    plain = bpe(("< e", "<e o", "<eo s", "<eos >"))
    assert Tokenizer.from_gguf(plain).eos_ids == ()  # a word that looks like one is not one


def test_a_byte_no_token_spells_is_left_out_and_still_keeps_its_neighbours_apart() -> None:
    metadata = bpe(("a b",), without="-")
    assert pieces(metadata, "ab") == ["ab"]
    assert pieces(metadata, "a") == ["a"]
    joined = bpe(("! ?",), without="-")
    assert pieces(joined, "!-?") == ["!", "?"]


def test_llama_bpe_takes_a_word_that_is_a_token_whatever_the_merges_say() -> None:
    metadata = bpe(("a b", "c d"), pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("abcd")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert pieces(metadata, "abcd") == ["abcd"]
    assert pieces(metadata | {"tokenizer.ggml.pre": "qwen2"}, "abcd") == ["ab", "cd"]


def test_letters_are_those_of_unicode_15() -> None:
    """U+105C0 became a letter in Unicode 16: here it is none, so the apostrophe belongs to it and not to the s."""
    metadata = bpe(("' s",))
    assert pieces(metadata, "é's")[-1] == "'s"
    assert pieces(metadata, "\U000105c0's")[-2:] == ["'", "s"]


def test_numbers_may_come_as_numpy_arrays() -> None:
    metadata = spm({"▁": -1, "a": -1})
    arrays = metadata | {
        "tokenizer.ggml.scores": np.array(metadata["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"], np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
    }
    assert Tokenizer.from_gguf(arrays).encode("a a") == Tokenizer.from_gguf(metadata).encode("a a")


def test_unused_tokens_spell_nothing_and_foreign_ids_are_refused() -> None:
    metadata = bpe(control=("[PAD]",))
    metadata["tokenizer.ggml.token_type"][-1] = 5
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.token_bytes(256) == b""
    for id in (-1, 257):
        with pytest.raises(KvarnError, match=f"token id {id} is outside the vocabulary of 257 tokens"):
            tokenizer.token_bytes(id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "nonesuch"}, "pre-tokenizer 'nonesuch' .* there are default, gpt-2, llama-bpe, .*qwen2, smollm"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not implemented; there are gpt2, llama"),
        ({"tokens": None}, "does not say tokenizer.ggml.tokens"),
        ({"merges": None}, "does not say tokenizer.ggml.merges"),
        ({"merges": ["a nonesuch"]}, "tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"),
        ({"token_type": [1, 2]}, r"tokenizer.ggml.token_type has the shape \(2,\), not \(256,\)"),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    metadata = bpe() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(KvarnError, match=message) as error:
        Tokenizer.from_gguf(metadata)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("metadata", [spm({"▁": -1}), bpe()], ids=["spm", "bpe"])
def test_a_lone_surrogate_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(KvarnError, match=r"lone surrogate \(U\+D800\) at 2"):
        Tokenizer.from_gguf(metadata).encode("ab\ud800")


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\0", "é", "🦙", "1", "'", "<", "<s>", "a\n", " 1", "\r\n"])
@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_a_megabyte_of_anything(kind: str, unit: str) -> None:
    words = {"▁": -1, "a": -1, "aa": -2, "aaaa": -3, "▁▁": -2, "▁▁▁▁": -3, "1": -1, "é": -1}
    small = spm(words, user_defined=("\n\n", "\n\n\n"))
    metadata = small if kind == "spm" else bpe(("a a", "aa aa", "Ġ Ġ", "Ċ Ċ"), control=("<s>",), pre="qwen2")
    tokenizer = Tokenizer.from_gguf(metadata)
    size = 1_000_000 if unit in ("a", " ") else 200_000  # what takes its square would not end for either
    text = unit * (size // len(unit.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer.from_gguf(spm({"▁": -1, "a": -1, "aa": -2}))
    texts = ["a" * n + "<s>" * (n % 3) for n in range(200)]
    expected = [tokenizer.encode(text, special=True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: tokenizer.encode(text, special=True), texts)) == expected
