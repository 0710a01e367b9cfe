"""Rounding to the form that a matrix takes, half to even.

f16 has a small range: a finite number beyond it becomes the largest one, and outputs of gates, which are
the largest numbers in a model, are stored divided by 2^6 (specs.GATE_SCALE). Infinity stays infinity.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, out):
    if out.dtype.element_ty == tl.float16:
        size = tl.abs(x)
        x = tl.where((size > 65504.0) & (size < float("inf")), tl.where(x > 0, 65504.0, -65504.0), x)
    return x.to(out.dtype.element_ty)
