"""Attention of single tokens: one split of one KV head of one token per program. `reduce` adds the splits.

The query heads of a KV head are the rows of a program, BM of them. The results of a split are not
divided yet: `partial` [tokens, heads, splits, BD], `ends` [tokens, heads, splits, 2] with peaks and masses.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import add_tile, first_split, load_tile, seen_by, with_sign
from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def decode(
    q,
    k,
    v,
    table,
    shifts,
    rows,
    positions,
    table_width,
    n_heads,
    group,
    dim,
    block_size,
    k_block,
    k_head,
    k_slot,
    v_block,
    v_head,
    v_slot,
    window,
    pinned,
    pinned_blocks,
    scale,
    tokens,
    partial,
    ends,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    index = tl.program_id(0)
    parts = (group + BM - 1) // BM
    stored_head = tl.program_id(1) // parts
    which = tl.program_id(2).to(tl.int64)
    n_splits = tl.num_programs(0)
    token = tl.load(tokens + which).to(tl.int64)
    pos = tl.load(positions + token)
    member = (tl.program_id(1) % parts) * BM + tl.arange(0, BM)
    head = stored_head * group + member
    mine = member < group
    pins, first = first_split(pos, window, pinned, SPLIT)
    split = tl.where(index < pins, index, first + index - pins)
    result = (which * n_heads + head) * n_splits + index
    if split * SPLIT > pos:
        tl.store(ends + 2 * result, tl.full((BM,), float("-inf"), tl.float32), mask=mine)
        tl.store(ends + 2 * result + 1, tl.zeros((BM,), tl.float32), mask=mine)
    else:
        row = tl.load(rows + token).to(tl.int64)
        shift = tl.load(shifts + row)
        d = tl.arange(0, BD)
        query = tl.load(
            q + (token * n_heads + head)[:, None] * dim + d[None, :], mask=mine[:, None] & (d < dim)[None, :], other=0.0
        )
        query, scale = with_sign(query, scale)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        mass = tl.zeros((BM, 8), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        for tile in range(SPLIT // TILE):
            key = split * SPLIT + tile * TILE + tl.arange(0, TILE)
            seen = seen_by(pos, key, window, pinned)
            logical = key // block_size
            entry = tl.where(logical < pinned_blocks, logical, logical - shift)
            block = tl.load(table + row * table_width + entry, mask=seen, other=0).to(tl.int64)
            slot = (key - logical * block_size).to(tl.int64)
            keys = load_tile(k, block, slot, seen, stored_head, d, dim, k_block, k_slot, k_head)
            values = load_tile(v, block, slot, seen, stored_head, d, dim, v_block, v_slot, v_head)
            s = tl.dot(query, tl.trans(keys), input_precision="ieee")
            s = tl.where(seen[None, :], s, float("-inf"))
            peak, mass, acc = add_tile(s, scale, values, peak, mass, acc)
        release(EARLY)
        tl.store(ends + 2 * result, peak, mask=mine)
        tl.store(ends + 2 * result + 1, tl.max(mass, 1), mask=mine)  # all columns are equal
        tl.store(partial + result[:, None] * BD + d[None, :], acc, mask=mine[:, None] & (d < dim)[None, :])
