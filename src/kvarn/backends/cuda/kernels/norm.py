"""RMS norm of rows, in f32. Its output is in the form that the matrices take."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import rounded


@triton.jit
def inverse_rms(x, width, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the row at x."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        part = tl.load(x + column, mask=column < width, other=0.0)
        squares = tl.fma(part, part, squares)
    mean = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def norm(x, weight, out, width, x_stride, out_stride, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    scale = inverse_rms(x, width, eps, BLOCK)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        part = tl.load(x + column, mask=inside, other=0.0) * scale
        part *= tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + row * out_stride + column, rounded(part, out), mask=inside)
