"""Adds the splits of a product that were kept apart, in order: BLOCK columns of one row per program.

out = scale sum + bias, or out += the same. `partial` has the sums as `end` in tiles.py leaves them: for each tile of
BM rows and BN columns, one split after another. There are at most MANY splits, and all of them are loaded at once.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.tiles import tile_at


@triton.jit
def total(
    partial,
    bias,
    out,
    n_rows,
    n_columns,
    out_stride,
    scale,
    biased,
    adds,
    splits,
    bm,
    bn,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    MANY: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    # UNIT divides BN, so that numbers of a unit are neighbours.
    first = (tl.program_id(1) * (BLOCK // UNIT) + tl.arange(0, BLOCK // UNIT)) * UNIT
    column = first[:, None] + tl.arange(0, UNIT)[None, :]
    inside = column < n_columns
    tile = tile_at(row // bm, first // bn, tl.cdiv(n_rows, bm), tl.cdiv(n_columns, bn), GROUP)
    at = (tile.to(tl.int64) * splits * bm * bn + row % bm * bn + first % bn)[:, None] + tl.arange(0, UNIT)[None, :]
    outputs = out + row.to(tl.int64) * out_stride + column
    wait(EARLY)
    release(EARLY)
    parts = ()
    for i in tl.static_range(MANY):
        parts = parts + (tl.load(partial + at + i * bm * bn, mask=inside & (i < splits), other=0.0),)  # noqa: RUF005
    acc = tl.zeros((BLOCK // UNIT, UNIT), tl.float32)
    for i in tl.static_range(MANY):
        acc += parts[i]  # nothing is changed by a zero: a sum is never -0
    acc *= scale
    if biased:
        acc += tl.load(bias + column, mask=inside, other=0.0)
    if adds:
        acc += tl.load(outputs, mask=inside, other=0.0)
    tl.store(outputs, acc, mask=inside)
