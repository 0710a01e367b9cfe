"""Adds the splits of `decode` in ascending order and divides: PIECE numbers of one query head of one token per program.

The result is in the form that the output matrix takes. A token that sees no key becomes NaN. MANY splits are
loaded at a time. A thread has one number of each of them, and computes itself what they are multiplied by.
A head has `width` numbers here, in rows of `held`, and `dim` in the output. If they are rotated, they are rotated back.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import factors, fold
from kvarn.backends.cuda.kernels.cells import rotated
from kvarn.backends.cuda.kernels.early import fence, release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def reduce(
    partial,
    ends,
    tokens,
    out,
    n_splits,
    n_heads,
    dim,
    width,
    out_stride,
    form,
    turned,
    held,
    PIECE: tl.constexpr,
    MANY: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    which, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    first = (which * n_heads + head) * n_splits
    peak = tl.full((PIECE,), float("-inf"), tl.float32)
    mass = tl.zeros((PIECE,), tl.float32)
    acc = tl.zeros((PIECE,), tl.float32)
    for start in range(0, n_splits, MANY):
        peak, mass, acc = _added(partial, ends, first, start, n_splits, width, d, held, peak, mass, acc, MANY, EARLY)
    token = tl.load(tokens + which).to(tl.int64)
    result = tl.div_rn(acc, mass)
    if turned:
        result = tl.reshape(rotated(tl.reshape(result, (1, PIECE)), "plain"), (PIECE,)) * (1.0 / 32)
    store_in_form(form, out, token * out_stride + head * dim + d, result, d < dim)


@triton.jit
def _added(partial, ends, first, start, n_splits, width, d, held, peak, mass, acc, MANY: tl.constexpr, EARLY):
    """More splits, as far as they are there. Of one without a key only peak and mass were written, and `fold` ignores
    the rest: no load waits for them."""
    inside = d < width
    everywhere = d * 0
    parts, peaks, masses = (), (), ()
    for i in tl.static_range(MANY):
        at = first + start + i
        there = (start + i < n_splits) & inside
        parts = parts + (tl.load(partial + at * held + d, mask=there, other=0.0),)  # noqa: RUF005
        peaks = peaks + (tl.load(ends + 2 * at + everywhere, mask=there, other=float("-inf")),)  # noqa: RUF005
        masses = masses + (tl.load(ends + 2 * at + 1 + everywhere, mask=there, other=0.0),)  # noqa: RUF005
    fence(first + d, EARLY)  # otherwise the compiler would load a split just before it is added
    for i in tl.static_range(MANY):
        peak, old, new, empty = factors(peak, peaks[i], masses[i])
        mass = fold(mass, masses[i], old, new, empty)
        acc = fold(acc, parts[i], old, new, empty)
    return peak, mass, acc
