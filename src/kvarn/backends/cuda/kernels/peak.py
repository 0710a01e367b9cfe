"""The largest score of a part of a row and the lowest token that has it: one part of one draw per program."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.weight import key_of


@triton.jit
def peak(rows, logits, peaks, n_tokens, stride, BLOCK: tl.constexpr):
    """peaks: [draws, parts]; the key of the score is above the 32 bits of 2^31 - 1 - token."""
    draw, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < n_tokens
    row = tl.load(rows + draw).to(tl.int64)
    key = key_of(tl.load(logits + row * stride + token, mask=inside, other=float("-inf")))
    packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    packed = tl.where(inside, packed, -0x7FFFFFFFFFFFFFFF)
    tl.store(peaks + draw * tl.num_programs(1) + part, tl.max(packed, 0))
