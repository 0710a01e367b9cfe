"""Rows of f32 in the form that a matrix takes, rounded half to even."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.form import rounded


@triton.jit
def convert(x, out, width, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    part = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, rounded(part, out), mask=inside)
