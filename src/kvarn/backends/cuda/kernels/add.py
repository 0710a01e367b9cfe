"""into += x."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def add(x, into, width, x_stride, into_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    into += row * into_stride + column
    old = tl.load(into, mask=inside, other=0.0)
    tl.store(into, old + tl.load(x + row * x_stride + column, mask=inside, other=0.0), mask=inside)
