"""Adds the splits of `decode` in ascending order and divides: PIECE numbers of HEADS query heads of one token per
program.

The result is in the form that the output matrix takes. A token that sees no key becomes NaN. Splits are
loaded MANY at a time, and what they are multiplied by is computed for all of them at once. A thread holds
some columns of all of them: four of whole heads, and one of a piece. `step` is 1. The compiler does not know
it, and so does not give a thread more columns of fewer splits.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import fold
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
    out_stride,
    form,
    step,
    HEADS: tl.constexpr,
    BD: tl.constexpr,
    PIECE: tl.constexpr,
    MANY: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    which = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine, d = head < n_heads, tl.arange(0, PIECE)
    if PIECE < BD:
        d = tl.program_id(2) * PIECE + d * step
    first = (which * n_heads + head) * n_splits
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS, 1), tl.float32)
    acc = tl.zeros((HEADS, PIECE), tl.float32)
    many = n_splits // MANY * MANY
    for start in range(0, many, MANY):
        at = first[None, :] + (start + tl.arange(0, MANY))[:, None]
        there = tl.broadcast_to(mine[None, :], at.shape)
        peak, mass, acc = _added(partial, ends, at, there, dim, d, peak, mass, acc, BD, EARLY)
    for start in range(many, n_splits, SOME):
        split = start + tl.arange(0, SOME)
        there = mine[None, :] & (split < n_splits)[:, None]
        at = first[None, :] + split[:, None]
        peak, mass, acc = _added(partial, ends, at, there, dim, d, peak, mass, acc, BD, EARLY)
    token = tl.load(tokens + which).to(tl.int64)
    result = tl.div_rn(acc, tl.broadcast_to(mass, acc.shape))
    inside = mine[:, None] & (d < dim)[None, :]
    store_in_form(form, out, token * out_stride + head[:, None] * dim + d[None, :], result, inside)


@triton.jit
def _added(partial, ends, at, there, dim, d, peak, mass, acc, BD: tl.constexpr, EARLY: tl.constexpr):
    """More splits, as far as they are there. Of one without a key only peak and mass were written, and `fold` ignores
    the rest: no load waits for them."""
    inside = there[:, :, None] & (d < dim)[None, None, :]
    parts = tl.load(partial + at[:, :, None] * BD + d[None, None, :], mask=inside, other=0.0)
    peaks = tl.load(ends + 2 * at, mask=there, other=float("-inf"))
    masses = tl.load(ends + 2 * at + 1, mask=there, other=0.0)
    later = there & (tl.arange(0, at.shape[0]) > 0)[:, None]
    before = tl.load(ends + 2 * at - 2, mask=later, other=float("-inf"))
    fence(at, EARLY)  # otherwise the compiler would load a split just before it is added
    # `factors` of each split: from the largest peak up to it, and before it.
    top = tl.maximum(tl.associative_scan(peaks, 0, _larger), peak[None, :])
    shift = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(tl.maximum(tl.associative_scan(before, 0, _larger), peak[None, :]) - shift)
    new = tl.exp2(peaks - shift)
    empty = ((peaks == float("-inf")) & (masses == 0.0)).to(tl.int32)
    for i in tl.static_range(at.shape[0]):
        by = (_row(old, i)[:, None], _row(new, i)[:, None], _row(empty, i)[:, None] != 0)
        mass = fold(mass, _row(masses, i)[:, None], *by)
        acc = fold(acc, _row(parts, i), *by)
    return tl.max(top, 0), mass, acc


@triton.jit
def _row(x, i: tl.constexpr):
    """x[i], bit for bit."""
    index = tl.arange(0, x.shape[0]).expand_dims(list(range(1, len(x.shape))))
    bits = tl.where(index == i, x.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, 0).to(x.dtype, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
