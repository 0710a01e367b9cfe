"""Adds biases to logits and applies penalties, in f64, rounded once. Each entry is a token of a row."""

import triton
import triton.language as tl


@triton.jit
def adjust(entries, biases, settings, logits, n_entries, stride, SETTINGS: tl.constexpr, BLOCK: tl.constexpr):
    """entries: (row, token, draw, count). count: how often the answer has the token; -1: the text does not have it.
    settings: ..., repetition, presence and frequency of each draw."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < n_entries
    row = tl.load(entries + entry * 4, mask=inside, other=0).to(tl.int64)
    token = tl.load(entries + entry * 4 + 1, mask=inside, other=0)
    draw = tl.load(entries + entry * 4 + 2, mask=inside, other=0)
    count = tl.load(entries + entry * 4 + 3, mask=inside, other=-1)
    given = settings + draw * SETTINGS + SETTINGS - 3
    repetition = tl.load(given, mask=inside & (count >= 0), other=1.0)
    presence = tl.load(given + 1, mask=inside & (count > 0), other=0.0)
    frequency = tl.load(given + 2, mask=inside & (count > 0), other=0.0)
    at = logits + row * stride + token
    score = tl.load(at, mask=inside, other=0.0).to(tl.float64) + tl.load(biases + entry, mask=inside, other=0.0)
    score = tl.where(score > 0, score / repetition, score * repetition)
    score -= presence + frequency * count.to(tl.float64)
    score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
    tl.store(at, score.to(tl.float32), mask=inside)
