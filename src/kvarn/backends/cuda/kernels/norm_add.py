"""into += norm(x), for models that normalize what they add."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.norm import inverse_rms, squares_of


@triton.jit
def norm_add(x, weight, into, width, x_stride, into_stride, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    into += row * into_stride
    scale = inverse_rms(squares_of(x, width, BLOCK), width, eps)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        part = tl.load(x + column, mask=inside, other=0.0) * scale
        part = part * tl.load(weight + column, mask=inside, other=0.0)
        old = tl.load(into + column, mask=inside, other=0.0)
        tl.store(into + column, old + part, mask=inside)
