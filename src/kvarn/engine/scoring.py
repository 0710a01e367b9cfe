"""Teacher forcing: the logits of a model over a given text, and perplexity as llama.cpp computes it."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from kvarn.arithmetic import exp
from kvarn.arrays import Floats
from kvarn.backends.base import Memory, Program
from kvarn.cache.cache import KVCache
from kvarn.engine.sampling import log_softmax
from kvarn.errors import KvarnError
from kvarn.words import counted


def score(program: Program, memory: Memory, cache: KVCache, tokens: Sequence[int], first: int, chunk: int) -> Floats:
    """Logits [len(tokens) - first, vocabulary] at positions first and later, computed in chunks."""
    parts = []
    cache.open(0)
    try:
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            if not cache.reserve(0, start + len(part)):
                raise KvarnError("the cache has no room for the text: free its sequences first")
            step = cache.prepare([0])
            wanted = range(max(first - start, 0), len(part))
            parts.append(program.run(memory, step, part, wanted).rows().copy())
            cache.advance(0, len(part))
            cache.commit(0, part)
    finally:
        cache.free(0)
    return np.concatenate(parts)


class Perplexity(NamedTuple):
    ppl: float
    error: float  # standard error of ppl
    tokens: int  # predictions scored
    chunks: int


def perplexity(
    program: Program,
    memory: Memory,
    cache: KVCache,
    tokens: Sequence[int],
    window: int,
    chunks: int | None,
    bos: int | None,
    chunk: int,
    progress: Callable[[Perplexity, int], None] = lambda so_far, total: None,
) -> Perplexity:
    """Cut the text into windows of n tokens. BOS replaces the first token of each window, if the model adds one.

    The second half of a window is scored: positions n/2 to n-2 predict the token after them. A window
    of 512 tokens has 255 predictions."""
    if window < 3:
        raise KvarnError(f"a window of {counted(window, 'token')} has nothing to score: give at least 3 (-c)")
    total = len(tokens) // window
    if chunks is not None:
        total = min(total, chunks)
    if total < 1:
        raise KvarnError(
            f"the text has {counted(len(tokens), 'token')}, fewer than one window of {window:,}: give a longer text"
        )
    losses: list[float] = []
    result = Perplexity(math.nan, math.nan, 0, 0)
    for index in range(total):
        text = list(tokens[index * window : (index + 1) * window])
        targets = text[window // 2 + 1 :]
        if bos is not None:
            text[0] = bos
        logprobs = log_softmax(score(program, memory, cache, text, window // 2, chunk)[:-1])
        losses += (-logprobs[np.arange(len(targets)), targets]).tolist()
        mean = fmean(losses)
        deviation = math.sqrt(fmean((loss - mean) ** 2 for loss in losses))
        ppl = float(exp(np.array(mean)))
        result = Perplexity(ppl, ppl * deviation / math.sqrt(max(len(losses) - 1, 1)), len(losses), index + 1)
        progress(result, total)
    return result
