"""What the kernels of products share: where a tile is, and what becomes of its sums.

The depth is cut into splits. One accumulator runs through a split in order, and splits are added in order,
so a row has the same bits whatever the tile and MODE are:

    whole     there is one split
    shared    a program per split. They leave their sums in `partial`, and the last one adds them all
    turns     one program computes all splits in turn

`counters` has a zero per tile, and has it again afterwards.
"""

import triton
import triton.language as tl


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles take turns, so programs that run together share weights and inputs."""
    first = tile // (GROUP * column_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    inside = tile - first * column_tiles
    return first + inside % rows, inside // rows


@triton.jit
def end(
    acc,
    tile,
    row_tile,
    column_tile,
    bias,
    out,
    partial,
    counters,
    n_rows,
    n_columns,
    out_stride,
    scale,
    biased,
    adds,
    splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MODE: tl.constexpr,
):
    """acc is [columns, rows]: the sum of this program's split if MODE is `shared`, and otherwise of all splits."""
    rows, columns = n_rows - row_tile * BM, n_columns - column_tile * BN
    bias += column_tile * BN
    out += (row_tile * BM).to(tl.int64) * out_stride + column_tile * BN
    if MODE == "shared":
        if splits == 1:
            finish(acc, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)
        else:
            sums = partial + tile.to(tl.int64) * splits * (BN * BM)
            at = tl.arange(0, BN)[:, None] + tl.arange(0, BM)[None, :] * BN
            tl.store(sums + tl.program_id(1) * (BN * BM) + at, acc)
            tl.debug_barrier()  # all threads have stored
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
            if arrived == splits - 1:
                total = tl.zeros((BN, BM), tl.float32)
                for i in range(splits):
                    total += tl.load(sums + i * (BN * BM) + at, cache_modifier=".cg")
                tl.store(counters + tile, 0)
                finish(total, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)
    else:
        finish(acc, bias, out, rows, columns, out_stride, scale, biased, adds, BM, BN)


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
