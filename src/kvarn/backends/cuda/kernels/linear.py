"""out = scale weight x + bias, or out += the same, or gated (tiles.py): a tile of columns and rows per program.

weight is [columns, depth] with rows of a padded length, x has rows of the same padded length. The
padding of x is zero, and that of weight too, so nothing is masked while reading. x has rows up to a
multiple of BM, whatever they contain: a row of the result depends on its own row of x only.

The weights are the left operand, so that one row is padded to BM, not to 64. A split of the depth is `share`
times DEPTH numbers (tiles.py).
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import prefetch, release, wait
from kvarn.backends.cuda.kernels.tiles import columns_of, end, place


@triton.jit
def linear(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    n_rows,
    n_columns,
    depth,
    out_stride,
    scale,
    biased,
    adds,
    splits,
    share,
    apart,
    gated,
    half,
    form,
    factor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile = tl.program_id(0)
    row_tile, column_tile = place(tile, tl.cdiv(n_rows, BM), tl.cdiv(n_columns, BN), GROUP)
    column = columns_of(column_tile, gated, half, BN)
    row = row_tile * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight + column.to(tl.int64)[:, None] * depth + k[None, :]
    inputs = x + row.to(tl.int64)[None, :] * depth + k[:, None]
    if MODE == "shared":
        first = tl.program_id(1) * share * DEPTH
        line = tl.minimum(first + 64 * tl.arange(0, AHEAD // 64), depth - 64)
        prefetch(weight + column.to(tl.int64)[:, None] * depth + line[None, :], EARLY)
    wait(EARLY)
    if MODE == "turns":
        acc = tl.zeros((BN, BM), tl.float32)
        for split in range(splits):
            acc += summed(weights, inputs, split, share, depth, BM, BN, BK, DEPTH)
    else:
        split = tl.program_id(1) if MODE == "shared" else 0
        acc = summed(weights, inputs, split, share, depth, BM, BN, BK, DEPTH)
    release(EARLY)
    sums = (bias, out, partial, counters)
    sizes = (n_rows, n_columns, out_stride)
    gating = (gated, half, form, factor)
    end(acc, tile, row_tile, column_tile, *sums, *sizes, scale, biased, adds, splits, apart, *gating, BM, BN, MODE)


@triton.jit
def summed(
    weights, inputs, split, share, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr
):
    """The products of one split. Blocks are counted, so that the compiler knows a divisor of every offset."""
    first = split * share
    n = tl.minimum(share, depth // DEPTH - first)
    weights += first * DEPTH
    inputs += first * DEPTH
    acc = tl.zeros((BN, BM), tl.float32)
    for _ in range(n * (DEPTH // BK)):
        acc = tl.dot(tl.load(weights), tl.load(inputs), acc, input_precision="ieee")
        weights += BK
        inputs += BK
    return acc
