"""Teacher forcing: the logits of a model over a given text, and perplexity as llama.cpp computes it.

A text is cut into windows. A model reads each window from its beginning, in steps, and gives logits at
every position that is asked for. Only the logits of one step are in memory.
"""

import math
from collections.abc import Callable, Generator, Sequence
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

STEP_BYTES = 32 << 20  # of the logits of one step: 170 rows of 49,152 numbers


def read(
    program: Program, memory: Memory, cache: KVCache, tokens: Sequence[int], first: int, chunk: int
) -> Generator[tuple[int, Floats]]:
    """Position and logits [rows, vocabulary] of each step, at positions `first` and later. The steps are the same for
    every cache that reads these tokens."""
    rows = max(STEP_BYTES // (4 * program.config.vocab_size), 1)
    start = 0
    cache.open(0)
    try:
        while start < len(tokens):
            stop = min(start + chunk, len(tokens))
            if stop > first:
                stop = min(stop, max(start, first) + rows)
            part = tokens[start:stop]
            if not cache.reserve(0, stop):
                raise KvarnError("the cache has no room for the text: free its sequences first")
            wanted = range(max(first - start, 0), len(part))
            logits = program.run(memory, cache.prepare([0]), part, wanted).rows().copy()
            cache.advance(0, len(part))
            cache.commit(0, part)
            if wanted:
                yield max(start, first), logits
            start = stop
    finally:
        cache.free(0)


def score(program: Program, memory: Memory, cache: KVCache, tokens: Sequence[int], first: int, chunk: int) -> Floats:
    """Logits [len(tokens) - first, vocabulary] at positions first and later, computed in chunks."""
    return np.concatenate([logits for _, logits in read(program, memory, cache, tokens, first, chunk)])


class Window(NamedTuple):
    tokens: list[int]  # what the model reads
    targets: list[int]  # the token after each position but the last


def windows(tokens: Sequence[int], size: int, most: int | None, bos: int | None) -> list[Window]:
    """Cut the text into windows of `size` tokens, at most `most` of them. BOS replaces the first token of each window,
    if the model adds one."""
    if size < 3:
        raise KvarnError(f"a window of {counted(size, 'token')} has nothing to score: give at least 3 (-c)")
    total = len(tokens) // size
    if total < 1:
        raise KvarnError(
            f"the text has {counted(len(tokens), 'token')}, fewer than one window of {size:,}: "
            "give a longer text, or a shorter window (-c)"
        )
    cut = [list(tokens[i * size : (i + 1) * size]) for i in range(total if most is None else min(total, most))]
    return [Window(text if bos is None else [bos, *text[1:]], text[1:]) for text in cut]


def scored_from(size: int) -> int:
    """The first position of a window that is scored: the second half, so that every prediction has a context."""
    return size // 2


class Mean(NamedTuple):
    value: float
    error: float  # standard error; NaN for fewer than two values


def mean(values: Sequence[float]) -> Mean:
    """llama.cpp's mean and its uncertainty, from sums without rounding, so that no machine gives other bits."""
    value = fmean(values) if values else math.nan
    if len(values) < 2 or not math.isfinite(value):
        return Mean(value, math.nan)
    variance = fmean([(each - value) * (each - value) for each in values])
    return Mean(value, math.sqrt(variance) / math.sqrt(len(values) - 1))


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
    """The second half of each window is scored: positions n/2 to n-2 predict the token after them. A window of 512
    tokens has 255 predictions."""
    cut = windows(tokens, window, chunks, bos)
    losses: list[float] = []
    result = Perplexity(math.nan, math.nan, 0, 0)
    for index, (text, targets) in enumerate(cut):
        for start, logits in read(program, memory, cache, text, scored_from(window), chunk):
            wanted = targets[start : start + len(logits)]
            logprobs = log_softmax(logits[: len(wanted)])
            losses += (-logprobs[np.arange(len(wanted)), wanted]).tolist()
        loss = mean(losses)
        ppl = float(exp(np.array(loss.value)))
        result = Perplexity(ppl, ppl * loss.error, len(losses), index + 1)
        progress(result, len(cut))
    return result
