"""Adds the splits of `decode` in ascending order and divides: one query head of one token per program.

The result is in the form that the output matrix takes. A token that sees no key becomes NaN.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import factors, fold
from kvarn.backends.cuda.kernels.early import release, wait
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
    MANY: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    which = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    first = which * n_splits * n_heads + head
    many = n_splits // MANY * MANY
    for start in range(0, many, MANY):  # the loads of these splits are under way together
        for i in tl.static_range(MANY):
            at = first + (start + i) * n_heads
            peak, mass, acc = _added(partial, peaks, masses, at, True, d, dim, peak, mass, acc)
    for start in range(many, n_splits, SOME):
        for i in tl.static_range(SOME):
            at, there = first + (start + i) * n_heads, start + i < n_splits
            peak, mass, acc = _added(partial, peaks, masses, at, there, d, dim, peak, mass, acc)
    token = tl.load(tokens + which).to(tl.int64)
    result = tl.div_rn(acc, tl.broadcast_to(mass, (BD,)))
    store_in_form(form, out, token * out_stride + head * dim + d, result, d < dim)


@triton.jit
def _added(partial, peaks, masses, at, there, d, dim, peak, mass, acc):
    """One split more, if it is there. Of a split without a key only peak and mass were written, and `fold` ignores
    the rest: no load waits for them."""
    one = tl.arange(0, 1)
    split_peak = tl.load(peaks + at + one, mask=(one == 0) & there, other=float("-inf"))
    split_mass = tl.load(masses + at + one, mask=(one == 0) & there, other=0.0)
    part = tl.load(partial + at * dim + d, mask=(d < dim) & there, other=0.0)
    peak, old, new, empty = factors(peak, split_peak, split_mass)
    return peak, fold(mass, split_mass, old, new, empty), fold(acc, part, old, new, empty)
