"""Makes the int4 or int6 cells of a tile when its last position is written: a token and stored head of K or V per
program, which does nothing if the token is not the last one of its tile.

The rows of the tile are in int8: in the tail, or beside it if this step wrote them (`encode`).
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.cells import INT4, TILE, halves, scale_of
from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def pack(
    positions,
    rows,
    cells,
    places,
    k_cells,
    v_cells,
    k_scale,
    v_scale,
    k_tail,
    v_tail,
    k_tail_scale,
    v_tail_scale,
    k_new,
    v_new,
    k_new_scale,
    v_new_scale,
    near,
    n_heads,
    k_width,
    v_width,
    block_size,
    row_block,
    row_head,
    row_slot,
    tail_block,
    tail_head,
    tail_slot,
    k_codec,
    v_codec,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    token, head = tl.program_id(0), tl.program_id(1) % n_heads
    pos, cell = tl.load(positions + token), tl.load(cells + token)
    is_key = tl.program_id(1) < n_heads
    codec, width = tl.where(is_key, k_codec, v_codec), tl.where(is_key, k_width, v_width)
    tail, tail_scale = tl.where(is_key, k_tail, v_tail), tl.where(is_key, k_tail_scale, v_tail_scale)
    new, new_scale = tl.where(is_key, k_new, v_new), tl.where(is_key, k_new_scale, v_new_scale)
    if (cell >= 0) & (pos % TILE == TILE - 1) & (codec >= INT4):
        row = tl.load(rows + token)
        slot = tl.arange(0, TILE)
        earlier = token - (TILE - 1) + slot  # the tokens of the tile, if this step has them
        there = earlier >= 0
        there = there & (tl.load(rows + earlier, mask=there, other=-1) == row)
        there = there & (tl.load(positions + earlier, mask=there, other=-1) == pos - (TILE - 1) + slot)
        kept = (2 * row + pos // TILE % 2) * TILE + slot
        place = tl.where(there, tl.load(places + earlier, mask=there, other=0), kept)
        is_new = place >= near
        place = tl.where(is_new, place - near, place).to(tl.int64)
        tail_row = place // TILE * tail_block + place % TILE * tail_slot + head * tail_head
        first = cell - (TILE - 1)  # a block has whole tiles
        at = (first // block_size).to(tl.int64) * row_block + (first % block_size + slot).to(tl.int64) * row_slot
        at += head * row_head
        _pack_rows(
            tl.where(is_new, new, tail) + tail_row * width,
            tl.where(is_new, new_scale, tail_scale) + tail_row,
            tl.where(is_key, k_cells, v_cells),
            tl.where(is_key, k_scale, v_scale),
            at,
            width // 32,
            codec,
        )


@triton.jit
def _pack_rows(codes, scales, cells, cell_scales, at, n_blocks, codec):
    """Rows of codes [TILE] with a scale each, into the cells of the rows `at`."""
    d = tl.arange(0, 32)[None, :]
    factor = tl.load(scales)
    finite = tl.abs(factor) < float("inf")
    factor = tl.where(finite, factor, 0.0)
    half = tl.where(codec == INT4, 7.5, 31.5)
    for block in range(n_blocks):
        y = tl.load(codes[:, None] + block * 32 + d).to(tl.float32) * factor[:, None]
        sound = finite & (tl.max(tl.abs(y), 1) < float("inf"))
        u, code = _best(tl.where(sound[:, None], y, 0.0), half)
        code = tl.where(sound[:, None], code, 255)
        place = at * n_blocks + block
        tl.store(cell_scales + place[:, None], code.to(tl.uint8))
        low, high = halves(u, 16)
        both = tl.reshape((low & 15) | ((high & 15) << 4), (TILE, 16)).to(tl.uint8)
        if codec == INT4:
            tl.store(cells + (place * 16)[:, None] + tl.arange(0, 16)[None, :], both)
        else:
            tl.store(cells + (place * 24)[:, None] + tl.arange(0, 16)[None, :], both)
            more = _or(_or((u >> 4) << (d // 8 * 2)))
            tl.store(cells + (place * 24 + 16)[:, None] + tl.arange(0, 8)[None, :], more.to(tl.uint8))


@triton.jit
def _best(y, half):
    """Codes [n, 32] and the code of a scale [n, 1] for blocks of 32 numbers: the best of three scales."""
    amax = tl.max(tl.abs(y), 1)
    need = tl.div_rn(amax, tl.broadcast_to(half, amax.shape)).to(tl.int32, bitcast=True)
    largest = tl.minimum(tl.maximum(((need + 0xFFFFF) >> 20) - 880, 1), 254)
    largest = largest[:, None]
    u, error, code = _rounded(y, largest, half), _error(y, largest, half), largest
    for less in tl.static_range(1, 3):
        other = tl.maximum(largest - less, 1)
        found = _error(y, other, half)
        better = found < error
        u = tl.where(better, _rounded(y, other, half), u)
        error, code = tl.where(better, found, error), tl.where(better, other, code)
    zero = (amax == 0.0)[:, None]
    return tl.where(zero, (half + 0.5).to(tl.int32), u.to(tl.int32)), tl.where(zero, 0, code)


@triton.jit
def _rounded(y, code, half):
    ratio = tl.div_rn(y, tl.broadcast_to(scale_of(code), y.shape))
    return tl.minimum(tl.maximum(tl.floor(ratio) + (half + 0.5), 0.0), half + half)


@triton.jit
def _error(y, code, half):
    """The sum of squares [n, 1], as a tree: 16 and 16, 8 and 8, ..."""
    e = (_rounded(y, code, half) - half) * scale_of(code) - y
    return _sum(_sum(_sum(_sum(_sum(e * e)))))


@triton.jit
def _or(bits):
    width: tl.constexpr = bits.shape[1] // 2
    low, high = halves(bits, width)
    return tl.reshape(low | high, (bits.shape[0], width))


@triton.jit
def _sum(e):
    """Half as many columns: each i added to i + half."""
    width: tl.constexpr = e.shape[1] // 2
    low, high = halves(e, width)
    return tl.reshape(low + high, (e.shape[0], width))
