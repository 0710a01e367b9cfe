"""Adds the splits of `decode` in ascending order and divides: one query head of one token per program.

The result is in the form that the output matrix takes. A token that sees no key becomes NaN.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import factors, fold
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def reduce(partial, peaks, masses, tokens, out, n_splits, n_heads, dim, out_stride, form, BD: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < dim
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    for split in range(n_splits):
        at = (which * n_splits + split) * n_heads + head
        split_peak = tl.load(peaks + at + tl.arange(0, 1))
        live = split_peak > float("-inf")  # the others were not written
        part = tl.load(partial + at * dim + d, mask=inside & tl.broadcast_to(live, (BD,)), other=0.0)
        split_mass = tl.load(masses + at + tl.arange(0, 1), mask=live, other=0.0)
        peak, old, new, empty = factors(peak, split_peak)
        mass = fold(mass, split_mass, old, new, empty)
        acc = fold(acc, part, old, new, empty)
    token = tl.load(tokens + which).to(tl.int64)
    result = tl.div_rn(acc, tl.broadcast_to(mass, (BD,)))
    store_in_form(form, out, token * out_stride + head * dim + d, result, inside)
