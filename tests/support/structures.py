"""A small vocabulary to compile structures for, and instances that go through masks token by token."""

from functools import cache

import numpy as np
from support.vocabularies import bpe

from kvarn.structured import Compiler, Structure
from kvarn.text.tokenizer import Tokenizer

MERGES = ('{ "', "t h", "i n", "k >", "th in", "thin k>", "< /", "> {", "Ċ Ċ", "t r", "u e", "tr ue", '" :')


@cache
def tokenizer() -> Tokenizer:
    """Two end tokens, a control token, and tokens that go beyond the end of </think>."""
    metadata = bpe(MERGES, control=("<|im_end|>", "<|endoftext|>", "<|tool|>"))
    size = len(metadata["tokenizer.ggml.tokens"])
    return Tokenizer.from_gguf(metadata | {"tokenizer.ggml.eos_token_id": size - 3})


@cache
def compiler() -> Compiler:
    return Compiler(tokenizer(), tokenizer().eos_ids)


def verdict(structure: Structure, text: str, after: str | None = None, begin: str | None = None) -> str:
    """`complete`, `accepting` (it may end or go on), `open`, or the text before the first forbidden token."""
    state = compiler().compile(structure).start(after, begin)
    output: list[int] = []
    for token in tokenizer().encode(text, bos=False, special=True):
        scores = np.zeros(tokenizer().vocab_size)
        state.mask(scores, output)
        if np.isneginf(scores[token]):
            return tokenizer().decode(output, special=True)
        output.append(token)
    scores = np.zeros(tokenizer().vocab_size)
    state.mask(scores, output)
    ends = np.isfinite(scores[list(tokenizer().eos_ids)])
    assert ends.all() == ends.any(), "all end tokens, or none"
    return "complete" if state.complete(output) else "accepting" if ends.all() else "open"
