"""Counts and sums the weights of a part of a row, by bucket: one part of one draw per program."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.weight import bucket_of, distance, weight


@triton.jit
def weights(draw, part, rows, logits, tokens, tops, settings, n_tokens, stride, SETTINGS, BLOCK: tl.constexpr):
    """The tokens of a part, their distances and weights. A row without a largest number has no weights."""
    token = part * BLOCK + tl.arange(0, BLOCK)
    live = (token < n_tokens) & (tl.load(tokens + draw) >= 0)
    row = tl.load(rows + draw).to(tl.int64)
    score = tl.load(logits + row * stride + token, mask=live, other=float("-inf"))
    x = distance(score, tl.load(tops + draw), tl.load(settings + draw * SETTINGS))
    return token, x, tl.where(live, weight(x), 0)


@triton.jit
def weigh(
    draws,
    rows,
    logits,
    tokens,
    tops,
    settings,
    counts,
    masses,
    kept,
    n_tokens,
    stride,
    SETTINGS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """kept: the sum of weights of at least min_p."""
    slot = tl.program_id(0)
    draw = tl.load(draws + slot)
    _, x, w = weights(draw, tl.program_id(1), rows, logits, tokens, tops, settings, n_tokens, stride, SETTINGS, BLOCK)
    at = slot * BUCKETS + bucket_of(x, BUCKETS)
    tl.atomic_add(counts + at, 1, mask=w > 0, sem="relaxed")
    tl.atomic_add(masses + at, w, mask=w > 0, sem="relaxed")
    least = tl.load(settings + draw * SETTINGS + 3)
    tl.atomic_add(kept + slot, tl.sum(tl.where(w.to(tl.float64) >= least, w, 0), 0), sem="relaxed")
