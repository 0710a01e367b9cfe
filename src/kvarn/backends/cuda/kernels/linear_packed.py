"""out = scale weight x + bias, or out += the same, where weight is packed in planes (planes.py).

A step of the loop is a unit of planes.py. Everything else is as in `linear`: the weights are the left
operand, and one accumulator runs through the depth in order, so a row has the same bits whatever BM and
BN are. Elements of planes have 16 bits: with 8, Triton would order columns differently for mma and wgmma.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.finish import finish
from kvarn.backends.cuda.kernels.unpack import MIDDLE, field, half


@triton.jit
def linear_packed(
    x,
    codes,
    headers,
    bias,
    out,
    n_rows,
    n_columns,
    padded,
    depth,
    units,
    out_stride,
    scale,
    biased,
    adds,
    BITS: tl.constexpr,
    FIELD: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    EACH: tl.constexpr = 16 // FIELD  # codes in an element
    OWN: tl.constexpr = (BLOCKS + EACH - 1) // EACH  # tiles with the low bits of a unit
    TILES: tl.constexpr = OWN + (FIELD < BITS)
    WORDS: tl.constexpr = BLOCKS if OFFSETS else BLOCKS // 2
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, SPAN)
    group, place = (column // 16).to(tl.int64), column % 16
    tiles = codes + (group * units * (16 * SPAN * TILES) + place * SPAN)[:, None] + k[None, :]
    words = headers + column
    inputs = x + row.to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for unit in range(units):
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
            given = tl.load(inputs + SPAN * i, mask=(unit * BLOCKS + i) * SPAN < depth, other=0.0)
            acc = tl.dot(tl.fma(by, code.to(tl.float16, bitcast=True), plus), given, acc)
        tiles += 16 * SPAN * TILES
        words += padded * WORDS
        inputs += SPAN * BLOCKS
    finish(acc, column, row, bias, out, n_rows, n_columns, out_stride, scale, biased, adds)
