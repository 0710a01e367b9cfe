"""Measures how long a tokenizer takes to construct, encode and decode, and the time to derive merges in Python.

    python bench/tokenization.py MODEL.gguf ...

Needs the PyPI package gguf. Non-goal: a comparison with other engines.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import gguf
import tokenizers

from kvarn.text.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times, it's said.\n" * 15_000  # about 1 MB


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def derived_merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a third token, best score first."""
    ids = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    pairs = [
        (-scores[id], ids[token[:cut]], token[:cut], token[cut:])
        for token, id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]


def main() -> None:
    for path in sys.argv[1:]:
        fields = gguf.GGUFReader(path).fields
        metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
        construct, tokenizer = timed(lambda metadata=metadata: Tokenizer.from_gguf(metadata))
        encode, ids = timed(lambda tokenizer=tokenizer: tokenizer.encode(TEXT))
        decode, _ = timed(lambda tokenizer=tokenizer, ids=ids: tokenizer.decode(ids))
        size = len(TEXT) / 1e6
        print(f"{path.rpartition('/')[2]}: {tokenizer.vocab_size} tokens, construct {construct:.3f} s, ", end="")
        print(f"encode {size / encode:.1f} MB/s, decode {size / decode:.1f} MB/s")
        if metadata["tokenizer.ggml.model"] == "llama":
            derive, merges = timed(lambda metadata=metadata: derived_merges(metadata))
            vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
            build, _ = timed(lambda vocab=vocab, merges=merges: tokenizers.models.BPE(vocab, merges))
            print(f"  instead: derive {len(merges)} merges {derive:.2f} s, construct the library's model {build:.2f} s")


main()
