"""Rounding to the form that a matrix takes, half to even. A form is known at run time (specs.FORM_CODES).

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
def load_in_form(form, x, offsets, mask):
    """Numbers at an address of f32, f16 or bf16, as f32."""
    if form == 0:
        found = tl.load(x + offsets, mask=mask, other=0.0)
    elif form == 1:
        found = tl.load(x.to(tl.pointer_type(tl.float16)) + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        found = tl.load(x.to(tl.pointer_type(tl.bfloat16)) + offsets, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def store_in_form(form, out, offsets, x, mask):
    """out is an address of f32, f16 or bf16."""
    if form == 0:
        tl.store(out + offsets, x, mask=mask)
    elif form == 1:
        halves = out.to(tl.pointer_type(tl.float16))
        tl.store(halves + offsets, rounded(x, halves), mask=mask)
    else:
        brains = out.to(tl.pointer_type(tl.bfloat16))
        tl.store(brains + offsets, rounded(x, brains), mask=mask)
