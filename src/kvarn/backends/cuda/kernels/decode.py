"""Attention of single tokens: some splits of one KV head of one token per program.

The query heads of a KV head are the rows of a program, BM of them. Of P programs for a token and head, program i
takes the splits i, i + P, i + 2 P, ... If there is one program, it adds its splits itself, and its result is
in the form that the output matrix takes. Otherwise `reduce` adds them: `partial` [tokens, heads, splits, BD],
and `ends` [tokens, heads, splits, 2] with peaks and masses.

With a tail, splits have the keys before the tile of the token. The tile itself, in int8, is one split more, the
last one.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import (
    add_tile,
    block_of,
    first_split,
    folded,
    scored,
    seen_by,
    with_sign,
)
from kvarn.backends.cuda.kernels.cells import TILE as OWN
from kvarn.backends.cuda.kernels.cells import (
    channels,
    end_of,
    has_tail,
    load_own,
    load_rows,
    prefetch_rows,
    tailed,
    turned_back,
)
from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def decode(
    q,
    k,
    v,
    k_scale,
    v_scale,
    k_tail,
    v_tail,
    k_tail_scale,
    v_tail_scale,
    table,
    shifts,
    rows,
    positions,
    table_width,
    n_heads,
    group,
    dim,
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
    window,
    pinned,
    pinned_blocks,
    scale,
    tokens,
    first_token,
    n_splits,
    partial,
    ends,
    out,
    out_stride,
    form,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    EARLY: tl.constexpr,
):
    # What is read before `wait` was written before the kernel that stores the new cells: that one has waited for it.
    own, programs = tl.program_id(0), tl.num_programs(0)
    parts = (group + BM - 1) // BM
    stored_head = tl.program_id(1) // parts
    which = tl.program_id(2).to(tl.int64)
    token = first_token + which  # if all tokens are single ones: then nothing has to be loaded for it
    if first_token < 0:
        token = tl.load(tokens + which).to(tl.int64)
    pos = tl.load(positions + token)
    member = (tl.program_id(1) % parts) * BM + tl.arange(0, BM)
    head = stored_head * group + member
    mine = member < group
    tail = has_tail(k_codec, v_codec, KEYS, VALUES)
    end = end_of(pos, tail)
    pins, first = first_split(pos, window, pinned, SPLIT)
    in_cells = tl.where(end > 0, tl.maximum(pins + (end - 1) // SPLIT - first + 1, 0), 0)  # splits
    seen_splits = tl.where(pos < 0, 0, in_cells + tail)
    n = tl.where(own < seen_splits, (seen_splits - own + programs - 1) // programs, 0)
    takes_tail = (tail != 0) & (pos >= 0) & (in_cells % programs == own)
    result = (which * n_heads + head) * n_splits + own  # of the first split
    row = tl.load(rows + token).to(tl.int64)
    shift = tl.load(shifts + token)
    TILES: tl.constexpr = SPLIT // TILE
    in_tiles = n - takes_tail.to(tl.int32)
    after = tl.where(own + in_tiles * programs - programs == in_cells - 1, TILES - 1 - (end - 1) % SPLIT // TILE, 0)
    n_tiles = tl.where(in_tiles > 0, in_tiles * TILES - after, 0)  # the last split of all may be short
    key = _keys(0, own, programs, pins, first, SPLIT, TILE)
    seen = _seen(key, tl.where(n_tiles > 0, end, 0), pos - window, pinned)
    block = block_of(table, shift, row, key, seen, table_width, block_size, pinned_blocks)
    if KEYS == "plain":
        place = block * row_block + (key % block_size).to(tl.int64) * row_slot + stored_head * row_head
        prefetch_rows(k, v, place, seen, k_width, BD, EARLY)
    wait(EARLY)
    if programs > 1:
        for i in range(n, (n_splits - own + programs - 1) // programs):  # those without a key
            tl.store(ends + 2 * (result + i * programs), tl.full((BM,), float("-inf"), tl.float32), mask=mine)
            tl.store(ends + 2 * (result + i * programs) + 1, tl.zeros((BM,), tl.float32), mask=mine)
    c, d = channels(BD, KEYS), channels(BD, VALUES)
    inside = mine[:, None] & (d < v_width)[None, :]
    query = tl.load(
        q + (token * n_heads + head)[:, None] * k_width + c[None, :],
        mask=mine[:, None] & (c < k_width)[None, :],
        other=0.0,
    )
    query, scale = with_sign(query, scale)
    total_peak = tl.full((BM,), float("-inf"), tl.float32)
    total_mass = tl.zeros((BM, 8), tl.float32)
    total = tl.zeros((BM, BD), tl.float32)
    peak, mass, acc = total_peak, total_mass, total
    for count in range(n_tiles):
        # The blocks of the next tile: loads of cells that had to wait for them would not run ahead.
        next_key = _keys(count + 1, own, programs, pins, first, SPLIT, TILE)
        next_seen = _seen(next_key, tl.where(count + 1 < n_tiles, end, 0), pos - window, pinned)
        next_block = block_of(table, shift, row, next_key, next_seen, table_width, block_size, pinned_blocks)
        place = block * row_block + (key % block_size).to(tl.int64) * row_slot + stored_head * row_head
        keys, k_factor = load_rows(k, k_scale, place, seen, k_width, k_codec, KEYS, BD)
        values, v_factor = load_rows(v, v_scale, place, seen, v_width, v_codec, VALUES, BD)
        s = tl.where(seen[None, :], scored(query, keys, k_factor, KEYS), float("-inf"))
        peak, mass, acc = add_tile(s, scale, values, v_factor, peak, mass, acc, VALUES)
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
        key, seen, block = next_key, next_seen, next_block
    if tailed(KEYS, VALUES):  # noqa: SIM102
        if takes_tail:
            own_key = end + tl.arange(0, OWN)
            own_seen = seen_by(pos, own_key, window, pinned)
            own_place = (
                (2 * row + end // OWN % 2) * tail_block + tl.arange(0, OWN) * tail_slot + stored_head * tail_head
            )
            own_block = block_of(table, shift, row, own_key, own_seen, table_width, block_size, pinned_blocks)
            in_table = own_block * row_block + (own_key % block_size).to(tl.int64) * row_slot + stored_head * row_head
            own_keys, own_k = load_own(
                k, k_scale, k_tail, k_tail_scale, in_table, own_place, own_seen, k_width, k_codec, KEYS, BD
            )
            own_values, own_v = load_own(
                v, v_scale, v_tail, v_tail_scale, in_table, own_place, own_seen, v_width, v_codec, VALUES, BD
            )
            own_s = tl.where(own_seen[None, :], scored(query, own_keys, own_k, KEYS), float("-inf"))
            peak, mass, acc = add_tile(own_s, scale, own_values, own_v, peak, mass, acc, VALUES)
            if programs == 1:
                total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
            else:
                at = result + in_cells // programs * programs
                tl.store(ends + 2 * at, peak, mask=mine)
                tl.store(ends + 2 * at + 1, tl.max(mass, 1), mask=mine)
                tl.store(partial + at[:, None] * BD + d[None, :], acc, mask=inside)
    release(EARLY)
    if programs == 1:
        quotient = tl.div_rn(total, tl.broadcast_to(tl.max(total_mass, 1)[:, None], total.shape))
        quotient = turned_back(quotient, v_codec, VALUES)
        inside = mine[:, None] & (d < dim)[None, :]
        store_in_form(form, out, token * out_stride + head[:, None] * dim + d[None, :], quotient, inside)


@triton.jit
def _seen(key, end, before, pinned):
    """`seen_by` of keys below `end`, which is not above the query: as few instructions as can be, because each load of
    cells has its own. The window begins after `before`."""
    return (key < end) & ((key > before) | (key < pinned))


@triton.jit
def _keys(count, own, programs, pins, first, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """The positions of a program's tile."""
    TILES: tl.constexpr = SPLIT // TILE
    index = own + count // TILES * programs
    split = tl.where(index < pins, index, first + index - pins)
    return split * SPLIT + count % TILES * TILE + tl.arange(0, TILE)
