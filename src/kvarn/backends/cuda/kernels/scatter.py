"""Puts tokens with a weight into their buckets, in any order: one part of one draw per program."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.weigh import weights
from kvarn.backends.cuda.kernels.weight import bucket_of


@triton.jit
def scatter(
    draws,
    rows,
    logits,
    tokens,
    tops,
    settings,
    cursors,
    members,
    n_tokens,
    stride,
    SETTINGS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0)
    draw = tl.load(draws + slot)
    token, x, w = weights(
        draw, tl.program_id(1), rows, logits, tokens, tops, settings, n_tokens, stride, SETTINGS, BLOCK
    )
    place = tl.atomic_add(cursors + slot * BUCKETS + bucket_of(x, BUCKETS), 1, mask=w > 0, sem="relaxed")
    tl.store(members + slot.to(tl.int64) * stride + place, token, mask=w > 0)
