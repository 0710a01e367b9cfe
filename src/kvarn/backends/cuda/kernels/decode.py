"""Attention of single tokens: some splits of one KV head of one token per program.

The query heads of a KV head are the rows of a program, BM of them. Of P programs for a token and head, program i
takes the splits i, i + P, i + 2 P, ... If there is one program, it adds its splits itself, and its result is
in the form that the output matrix takes. Otherwise `reduce` adds them: `partial` [tokens, heads, splits, BD],
and `ends` [tokens, heads, splits, 2] with peaks and masses.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import add_tile, first_split, folded, load_tile, seen_by, with_sign
from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


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
    n_splits,
    partial,
    ends,
    out,
    out_stride,
    form,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    own, programs = tl.program_id(0), tl.num_programs(0)
    parts = (group + BM - 1) // BM
    stored_head = tl.program_id(1) // parts
    which = tl.program_id(2).to(tl.int64)
    token = tl.load(tokens + which).to(tl.int64)
    pos = tl.load(positions + token)
    member = (tl.program_id(1) % parts) * BM + tl.arange(0, BM)
    head = stored_head * group + member
    mine = member < group
    pins, first = first_split(pos, window, pinned, SPLIT)
    seen_splits = tl.where(pos < 0, 0, pins + pos // SPLIT - first + 1)
    n = tl.where(own < seen_splits, (seen_splits - own + programs - 1) // programs, 0)
    result = (which * n_heads + head) * n_splits + own  # of the first split
    if programs > 1:
        for i in range(n, (n_splits - own + programs - 1) // programs):  # those without a key
            tl.store(ends + 2 * (result + i * programs), tl.full((BM,), float("-inf"), tl.float32), mask=mine)
            tl.store(ends + 2 * (result + i * programs) + 1, tl.zeros((BM,), tl.float32), mask=mine)
    row = tl.load(rows + token).to(tl.int64)
    shift = tl.load(shifts + row)
    d = tl.arange(0, BD)
    inside = mine[:, None] & (d < dim)[None, :]
    query = tl.load(q + (token * n_heads + head)[:, None] * dim + d[None, :], mask=inside, other=0.0)
    query, scale = with_sign(query, scale)
    total_peak = tl.full((BM,), float("-inf"), tl.float32)
    total_mass = tl.zeros((BM, 8), tl.float32)
    total = tl.zeros((BM, BD), tl.float32)
    peak, mass, acc = total_peak, total_mass, total
    TILES: tl.constexpr = SPLIT // TILE
    after = tl.where(own + n * programs - programs == seen_splits - 1, TILES - 1 - pos % SPLIT // TILE, 0)
    n_tiles = tl.where(n > 0, n * TILES - after, 0)  # the last split of all may be short
    for count in range(n_tiles):
        index = own + count // TILES * programs
        split = tl.where(index < pins, index, first + index - pins)
        key = split * SPLIT + count % TILES * TILE + tl.arange(0, TILE)
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
        if (count % TILES == TILES - 1) | (count == n_tiles - 1):
            if programs == 1:
                total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
            else:
                at = result + count // TILES * programs
                tl.store(ends + 2 * at, peak, mask=mine)
                tl.store(ends + 2 * at + 1, tl.max(mass, 1), mask=mine)  # all columns are equal
                tl.store(partial + at[:, None] * BD + d[None, :], acc, mask=inside)
            peak = tl.full((BM,), float("-inf"), tl.float32)
            mass = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, BD), tl.float32)
    release(EARLY)
    if programs == 1:
        quotient = tl.div_rn(total, tl.broadcast_to(tl.max(total_mass, 1)[:, None], total.shape))
        store_in_form(form, out, token * out_stride + head[:, None] * dim + d[None, :], quotient, inside)
