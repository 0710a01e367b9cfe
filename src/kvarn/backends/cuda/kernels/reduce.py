"""Adds the splits of `decode` in ascending order and divides: one query head of one token per program.

The result is in the form that the output matrix takes. A token that sees no key becomes NaN.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import factors, fold
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def reduce(
    partial,
    peaks,
    masses,
    tokens,
    out,
    n_splits,
    n_heads,
    dim,
    out_stride,
    form,
    BD: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    which = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    first = which * n_splits * n_heads + head
    several = n_splits // TOGETHER * TOGETHER
    for start in range(0, several, TOGETHER):  # loads of several splits are under way at a time
        for i in tl.static_range(TOGETHER):
            at = first + (start + i) * n_heads
            peak, mass, acc = _added(partial, peaks, masses, at, d, dim, peak, mass, acc)
    for split in range(several, n_splits):
        peak, mass, acc = _added(partial, peaks, masses, first + split * n_heads, d, dim, peak, mass, acc)
    token = tl.load(tokens + which).to(tl.int64)
    result = tl.div_rn(acc, tl.broadcast_to(mass, (BD,)))
    store_in_form(form, out, token * out_stride + head * dim + d, result, d < dim)


@triton.jit
def _added(partial, peaks, masses, at, d, dim, peak, mass, acc):
    """One split more. Of a split without a key only the peak was written, and `fold` ignores the rest: no load waits
    for the peak."""
    one = tl.arange(0, 1)
    split_peak = tl.load(peaks + at + one)
    split_mass = tl.load(masses + at + one)
    part = tl.load(partial + at * dim + d, mask=d < dim, other=0.0)
    peak, old, new, empty = factors(peak, split_peak)
    return peak, fold(mass, split_mass, old, new, empty), fold(acc, part, old, new, empty)
