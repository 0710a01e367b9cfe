"""What the kernels of products share: where a tile is, and what becomes of its sums.

The depth is cut into splits. One accumulator runs through a split in order, and splits are added in order,
so a row has the same bits whatever the tile and MODE are:

    whole     there is one split
    shared    a program per split. They leave their sums in `partial`. The last one adds them all, or if they
              are kept `apart`, the kernel `total` does
    turns     one program computes all splits in turn

`counters` has a zero per tile, and has it again afterwards.

A product of gate and up, `half` columns each, may be gated (specs.ACTIVATION_CODES): it has one split, and a tile has
as many columns of one as of the other. Its output is activation(gate) * up * factor, in a form.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.form import store_in_form
from kvarn.backends.cuda.kernels.gate import activated


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles take turns, so programs that run together share weights and inputs."""
    first = tile // (GROUP * column_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    inside = tile - first * column_tiles
    return first + inside % rows, inside // rows


@triton.jit
def tile_at(row_tile, column_tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The tile that is there, as `place` has it."""
    first = row_tile // GROUP * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    return first * column_tiles + column_tile * rows + row_tile - first


@triton.jit
def columns_of(column_tile, gated, half, BN: tl.constexpr):
    """The rows of the matrix that a tile multiplies with. If it is gated, its second half belongs to up."""
    HALF: tl.constexpr = BN // 2
    i = tl.arange(0, BN)
    first = column_tile * tl.where(gated != 0, HALF, BN)
    return first + i + i // HALF * tl.where(gated != 0, half - HALF, 0)


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
    apart,
    gated,
    half,
    form,
    factor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MODE: tl.constexpr,
):
    """acc is [columns, rows]: the sum of this program's split if MODE is `shared`, and otherwise of all splits."""
    if MODE != "turns":  # noqa: SIM102
        if gated:
            finish_gated(acc, row_tile, column_tile, out, n_rows, out_stride, scale, gated, half, form, factor, BM, BN)
            return
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
            if apart == 0:
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
def finish_gated(
    acc,
    row_tile,
    column_tile,
    out,
    n_rows,
    out_stride,
    scale,
    gated,
    half,
    form,
    factor,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    HALF: tl.constexpr = BN // 2
    gate, up = tl.split(tl.permute(tl.reshape(acc * scale, (2, HALF, BM)), (1, 2, 0)))
    y = activated(gate, gated)
    row, column = row_tile * BM + tl.arange(0, BM), column_tile * HALF + tl.arange(0, HALF)
    inside = (column < half)[:, None] & (row < n_rows)[None, :]
    offsets = row.to(tl.int64)[None, :] * out_stride + column[:, None]
    store_in_form(form, out, offsets, y * up * factor, inside)


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
