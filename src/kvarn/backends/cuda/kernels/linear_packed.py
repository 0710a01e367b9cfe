"""out = scale weight x + bias, or out += the same, where weight is packed in planes (planes.py).

A step of the loop is a unit of planes.py, and a split of the depth is `share` units. Everything else is as
in `linear`: the weights are the left operand, and sums are those of tiles.py. Elements of planes have 16
bits: with 8, Triton would order columns differently for mma and wgmma.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.tiles import columns_of, end, place
from kvarn.backends.cuda.kernels.unpack import MIDDLE, field, half


@triton.jit
def linear_packed(
    x,
    codes,
    headers,
    bias,
    out,
    partial,
    counters,
    n_rows,
    n_columns,
    padded,
    depth,
    units,
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
    BITS: tl.constexpr,
    FIELD: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    EARLY: tl.constexpr,
):
    EACH: tl.constexpr = 16 // FIELD  # codes in an element
    OWN: tl.constexpr = (BLOCKS + EACH - 1) // EACH  # tiles with the low bits of a unit
    UNIT: tl.constexpr = 16 * SPAN * (OWN + (FIELD < BITS))  # elements of 16 rows
    tile = tl.program_id(0)
    row_tile, column_tile = place(tile, tl.cdiv(n_rows, BM), tl.cdiv(n_columns, BN), GROUP)
    column = columns_of(column_tile, gated, half, BN)
    row = row_tile * BM + tl.arange(0, BM)
    k = tl.arange(0, SPAN)
    group, inside = (column // 16).to(tl.int64), column % 16
    tiles = codes + (group * units * UNIT + inside * SPAN)[:, None] + k[None, :]
    words = headers + column
    inputs = x + row.to(tl.int64)[None, :] * depth + k[:, None]
    wait(EARLY)
    if MODE == "turns":
        acc = tl.zeros((BN, BM), tl.float32)
        for split in range(splits):
            acc += summed(
                *(tiles, words, inputs, split, share, padded, depth, units),
                *(BITS, FIELD, OFFSETS, BLOCKS, SPAN, EACH, OWN, UNIT, BM, BN, DEPTH),
            )
    else:
        split = tl.program_id(1) if MODE == "shared" else 0
        acc = summed(
            *(tiles, words, inputs, split, share, padded, depth, units),
            *(BITS, FIELD, OFFSETS, BLOCKS, SPAN, EACH, OWN, UNIT, BM, BN, DEPTH),
        )
    release(EARLY)
    sums = (bias, out, partial, counters)
    sizes = (n_rows, n_columns, out_stride)
    gating = (gated, half, form, factor)
    end(acc, tile, row_tile, column_tile, *sums, *sizes, scale, biased, adds, splits, apart, *gating, BM, BN, MODE)


@triton.jit
def summed(
    tiles,
    words,
    inputs,
    split,
    share,
    padded,
    depth,
    units,
    BITS: tl.constexpr,
    FIELD: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    EACH: tl.constexpr,
    OWN: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The products of one split. The depth is a multiple of DEPTH. If a unit is no divisor of that, the last one may
    have blocks behind the inputs."""
    WORDS: tl.constexpr = BLOCKS if OFFSETS else BLOCKS // 2
    first = split * share
    tiles += first.to(tl.int64) * UNIT
    words += first.to(tl.int64) * padded * WORDS
    inputs += first * (SPAN * BLOCKS)
    acc = tl.zeros((BN, BM), tl.float32)
    for unit in range(first, tl.minimum(first + share, units)):
        if FIELD < BITS:
            upper = tl.load(tiles + OWN * 16 * SPAN)
        for i in tl.static_range(BLOCKS):
            if i % EACH == 0:
                tile = tl.load(tiles + i // EACH * 16 * SPAN)
            code = field(tile, 10 - BITS - i % EACH * FIELD, (2**FIELD - 1) << (10 - BITS))
            if FIELD < BITS:
                code |= field(upper, 8 - 2 * i, 3 << 8)
            if OFFSETS:
                word = tl.load(words + i * padded)
                by = half(word, 0)
                plus = half(word, 1)
            else:
                if i % 2 == 0:
                    word = tl.load(words + i // 2 * padded)
                by = half(word, i % 2)
                plus = by * MIDDLE
            by, plus = tl.broadcast_to(by, (BN, SPAN)), tl.broadcast_to(plus, (BN, SPAN))
            if DEPTH % (BLOCKS * SPAN) == 0:
                given = tl.load(inputs + SPAN * i)
            else:
                given = tl.load(inputs + SPAN * i, mask=(unit * BLOCKS + i) * SPAN < depth, other=0.0)
            acc = tl.dot(tl.fma(by, code.to(tl.float16, bitcast=True), plus), given, acc)
        tiles += UNIT
        words += padded * WORDS
        inputs += SPAN * BLOCKS
    return acc
