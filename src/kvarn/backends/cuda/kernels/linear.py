"""out = scale weight x + bias, or out += the same: a tile of columns and rows per program.

weight is [columns, depth] with rows of a padded length, x has rows of the same padded length. The
padding of x is zero, and that of weight too, so nothing is masked while reading. x has rows up to a
multiple of BM, whatever they contain: a row of the result depends on its own row of x only.

The weights are the left operand, so that one row is padded to BM, not to 64. The depth is cut into splits
of `share` times DEPTH numbers. One accumulator runs through a split in order, and splits are added in
order, so a row has the same bits whatever BM, BN and MODE are:

    whole     there is one split
    shared    a program per split. They leave their sums in `partial`, and the last one adds them all
    turns     one program computes all splits in turn

`counters` has a zero per tile, and has it again afterwards.
"""

import triton
import triton.language as tl


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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
):
    tile = tl.program_id(0)
    row_tile, column_tile = place(tile, tl.cdiv(n_rows, BM), tl.cdiv(n_columns, BN), GROUP)
    column = column_tile * BN + tl.arange(0, BN)
    row = row_tile * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight + column.to(tl.int64)[:, None] * depth + k[None, :]
    inputs = x + row.to(tl.int64)[None, :] * depth + k[:, None]
    rows, columns = n_rows - row_tile * BM, n_columns - column_tile * BN
    bias += column_tile * BN
    out += (row_tile * BM).to(tl.int64) * out_stride + column_tile * BN
    if MODE == "turns":
        total = tl.zeros((BN, BM), tl.float32)
        for split in range(splits):
            total += summed(weights, inputs, split, share, depth, BM, BN, BK, DEPTH)
        finish(total, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)
    elif MODE == "whole":
        total = summed(weights, inputs, 0, share, depth, BM, BN, BK, DEPTH)
        finish(total, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)
    else:
        split = tl.program_id(1)
        part = summed(weights, inputs, split, share, depth, BM, BN, BK, DEPTH)
        if splits == 1:
            finish(part, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)
        else:
            sums = partial + tile.to(tl.int64) * splits * (BN * BM)
            at = tl.arange(0, BN)[:, None] + tl.arange(0, BM)[None, :] * BN
            tl.store(sums + split * (BN * BM) + at, part)
            tl.debug_barrier()  # all threads have stored
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
            if arrived == splits - 1:
                total = tl.zeros((BN, BM), tl.float32)
                for i in range(splits):
                    total += tl.load(sums + i * (BN * BM) + at, cache_modifier=".cg")
                tl.store(counters + tile, 0)
                finish(total, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles take turns, so programs that run together share weights and inputs."""
    first = tile // (GROUP * column_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    inside = tile - first * column_tiles
    return first + inside % rows, inside // rows


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


@triton.jit
def finish(acc, bias, out, rows, columns, out_stride, scale, biased, adds, BM: tl.constexpr, BN: tl.constexpr):
    """A tile of results, of which `rows` and `columns` exist. Offsets inside of a tile have 32 bits."""
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    acc *= scale
    if biased:
        acc += tl.load(bias + column, mask=column < columns, other=0.0)[:, None]
    outputs = out + (row[None, :] * out_stride + column[:, None])
    if adds:
        acc += tl.load(outputs, mask=inside, other=0.0)
    tl.store(outputs, acc, mask=inside)
