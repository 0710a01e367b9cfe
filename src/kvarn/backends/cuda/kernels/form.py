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


@triton.jit
def store_in_form(form, out, offsets, x, mask):
    """out is an address of f32, f16 or bf16, as `form` says (specs.FORM_CODES)."""
    if form == 0:
        tl.store(out + offsets, x, mask=mask)
    elif form == 1:
        halves = out.to(tl.pointer_type(tl.float16))
        tl.store(halves + offsets, rounded(x, halves), mask=mask)
    else:
        brains = out.to(tl.pointer_type(tl.bfloat16))
        tl.store(brains + offsets, rounded(x, brains), mask=mask)
