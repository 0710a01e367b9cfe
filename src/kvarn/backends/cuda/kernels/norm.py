"""RMS norm of rows, in f32. Its output is in the form that the matrices take.

A row that fits into BLOCK numbers is read once, and its weights before the row is there.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def inverse_rms(squares, width, eps):
    """1 / sqrt(mean + eps) of a row, from sums of its squares."""
    mean = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def squares_of(x, width, BLOCK: tl.constexpr):
    """BLOCK sums of squares of the row at x."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        part = tl.load(x + column, mask=column < width, other=0.0)
        squares = tl.fma(part, part, squares)
    return squares


@triton.jit
def norm(x, weight, out, width, x_stride, out_stride, eps, form, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    begin = row * out_stride
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0)
    wait(EARLY)
    release(EARLY)
    if width <= BLOCK:
        part = tl.load(x + column, mask=inside, other=0.0)
        part = part * inverse_rms(part * part, width, eps) * factor
        store_in_form(form, out, begin + column, part, inside)
    else:
        scale = inverse_rms(squares_of(x, width, BLOCK), width, eps)
        for start in range(0, width, BLOCK):
            part = tl.load(x + start + column, mask=start + column < width, other=0.0) * scale
            part *= tl.load(weight + start + column, mask=start + column < width, other=0.0)
            store_in_form(form, out, begin + start + column, part, start + column < width)
