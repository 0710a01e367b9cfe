"""The token with the largest score of a row, from the parts of `peak`: one draw per program."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.weight import NAN_KEY, score_of


@triton.jit
def choose(model, edited, tokens, tops, n_parts, BLOCK: tl.constexpr):
    """model: peaks of the model's own logits. If the largest is not finite, the token is -1 for NaN, -2 for infinity
    and -3 for -infinity."""
    draw = tl.program_id(0)
    own = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, n_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        inside = part < n_parts
        own = tl.maximum(own, tl.load(model + draw * n_parts + part, mask=inside, other=-0x7FFFFFFFFFFFFFFF))
        best = tl.maximum(best, tl.load(edited + draw * n_parts + part, mask=inside, other=-0x7FFFFFFFFFFFFFFF))
    own_key = (tl.max(own, 0) >> 32).to(tl.int32)
    found = tl.max(best, 0)
    largest = score_of(own_key)
    token = (0x7FFFFFFF - (found & 0xFFFFFFFF)).to(tl.int32)
    token = tl.where(largest == float("inf"), -2, token)
    token = tl.where(largest == float("-inf"), -3, token)
    token = tl.where(own_key == NAN_KEY, -1, token)
    tl.store(tokens + draw, token)
    tl.store(tops + draw, score_of((found >> 32).to(tl.int32)))
