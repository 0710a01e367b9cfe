"""Where the tokens of each bucket begin: one draw per program."""

import triton
import triton.language as tl


@triton.jit
def starts(counts, cursors, BUCKETS: tl.constexpr):
    at = tl.program_id(0) * BUCKETS + tl.arange(0, BUCKETS)
    count = tl.load(counts + at)
    tl.store(cursors + at, tl.cumsum(count, 0) - count)
