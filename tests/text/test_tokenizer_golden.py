"""Agreement with llama.cpp, on its own vectors and on 10,000 hard texts for every real vocabulary and pre-tokenizer."""

from functools import cache
from pathlib import Path

import pytest
from support import golden_tokens, models
from support.hard_texts import hard_texts
from support.vocabularies import control_ids

from kvarn.text.tokenizer import Tokenizer

NAMES = list(golden_tokens.MODELS)


@cache
def texts() -> list[str]:
    return list(hard_texts(golden_tokens.SEED, golden_tokens.COUNT))


@cache
def tokenizer(name: str) -> Tokenizer:
    file, pre = golden_tokens.MODELS[name]
    metadata = models.gguf_metadata(models.model(file))
    return Tokenizer.from_gguf(metadata if pre is None else metadata | {"tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3"])
def test_vectors(name: str) -> None:
    path = models.material(f"data/tokenizer/ggml-vocab-{name}.gguf")
    tokenizer = models.tokenizer(path)
    inputs = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = [[int(id) for id in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    assert len(inputs) == len(outputs) > 40
    for text, expected in zip(inputs, outputs, strict=True):
        assert tokenizer.encode(text, bos=False) == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_hard_texts(name: str, special: bool) -> None:
    golden = golden_tokens.read(name)
    assert golden["texts"] == golden_tokens.digest_texts(texts()), "made from other texts: run scripts/golden_tokens.py"
    digests = golden["special" if special else "plain"]
    wrong = [
        text
        for i, text in enumerate(texts())
        if golden_tokens.digest(tokenizer(name).encode(text, bos=False, special=special)) != digests[8 * i : 8 * i + 8]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_text_back(name: str) -> None:
    """Where the vocabulary has every byte of it: SmolLM2's lacks six control characters and the planes from U+40000."""
    spelled = {byte for id in range(tokenizer(name).vocab_size) for byte in tokenizer(name).token_bytes(id)}
    possible = [text for text in texts() if spelled.issuperset(text.encode())]
    assert len(possible) > 9_000
    assert [text for text in possible if tokenizer(name).decode(tokenizer(name).encode(text)) != text] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_text_becomes_a_control_token_by_itself(name: str) -> None:
    special = control_ids(tokenizer(name))
    assert [text for text in texts() if not special.isdisjoint(tokenizer(name).encode(text, bos=False))] == []


@pytest.mark.parametrize(
    ("name", "bos", "ends"),
    [
        ("smollm2", 1, ["<|im_end|>", "<|endoftext|>"]),
        ("qwen2.5", 151643, ["<|im_end|>", "<|endoftext|>"]),
        ("tinyllama", 1, ["</s>"]),
        ("gemma3", 2, ["<eos>", "<end_of_turn>"]),
    ],
)
def test_special_tokens_of_real_models(name: str, bos: int, ends: list[str]) -> None:
    assert tokenizer(name).bos_id == bos
    assert [tokenizer(name).token_bytes(id).decode() for id in tokenizer(name).eos_ids] == ends
