"""Attention of sequences with several new tokens: BM query rows of one KV head of one sequence per program.

A row is a pair (token, query head of the KV head). The program goes through the splits that its rows
see, in order, and adds them as `reduce` does. A row has the same bits as in `decode`. The result is in the
form that the output matrix takes.

With a tail, splits have the keys before the tile of a row. The tiles of the rows themselves, in int8, are one split
more, the last one. Keys of this step are not in the tail yet: they lie beside it, in the order of tokens (`k_new`).
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import (
    add_tile,
    block_of,
    first_split,
    folded,
    only_finite,
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
    tailed,
    turned_back,
)
from kvarn.backends.cuda.kernels.early import wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def prefill(
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
    k_new,
    v_new,
    k_new_scale,
    v_new_scale,
    starts,
    counts,
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
    wait(EARLY)
    stored_head = tl.program_id(1)
    start = tl.load(starts + tl.program_id(2)).to(tl.int64)
    n_rows = tl.load(counts + tl.program_id(2)) * group
    begin = tl.program_id(0) * BM
    if begin < n_rows:
        member = begin + tl.arange(0, BM)
        mine = member < n_rows
        oldest = tl.load(positions + start)  # of this step
        lowest = oldest + begin // group
        last = oldest + (tl.minimum(begin + BM, n_rows) - 1) // group
        pos = oldest + member // group
        line = (start + member // group) * n_heads + stored_head * group + member % group
        row = tl.load(rows + start).to(tl.int64)
        shift = tl.load(shifts + start)
        c, d = channels(BD, KEYS), channels(BD, VALUES)
        query = tl.load(
            q + line[:, None] * k_width + c[None, :], mask=mine[:, None] & (c < k_width)[None, :], other=0.0
        )
        query, scale = with_sign(query, scale)
        tail = has_tail(k_codec, v_codec, KEYS, VALUES)
        end, first_end, last_end = end_of(pos, tail), end_of(lowest, tail), end_of(last, tail)
        pins, first = first_split(lowest, window, pinned, SPLIT)
        total_peak = tl.full((BM,), float("-inf"), tl.float32)
        total_mass = tl.zeros((BM, 8), tl.float32)
        total = tl.zeros((BM, BD), tl.float32)
        peak, mass, acc = total_peak, total_mass, total
        TILES: tl.constexpr = SPLIT // TILE
        before = pins + (last_end - 1) // SPLIT - first  # splits before the last one
        n_tiles = tl.where(last_end > 0, before * TILES + (last_end - 1) % SPLIT // TILE + 1, 0)
        for count in range(n_tiles):
            index = count // TILES
            split = tl.where(index < pins, index, first + index - pins)
            base = split * SPLIT + count % TILES * TILE
            key = base + tl.arange(0, TILE)
            wanted = (key < last_end) & ((key > lowest - window) | (key < pinned))  # by any of the rows
            block = block_of(table, shift, row, key, wanted, table_width, block_size, pinned_blocks)
            place = block * row_block + (key % block_size).to(tl.int64) * row_slot + stored_head * row_head
            keys, k_factor = load_rows(k, k_scale, place, wanted, k_width, k_codec, KEYS, BD)
            values, v_factor = load_rows(v, v_scale, place, wanted, v_width, v_codec, VALUES, BD)
            s = scored(query, keys, k_factor, KEYS)
            if (base + TILE > first_end) | (base <= last - window):  # some rows may not see some of these keys
                s, values, v_factor = only_finite(s, values, v_factor, VALUES)
                seen = seen_by(pos[:, None], key[None, :], window, pinned) & (key[None, :] < end[:, None])
                s = tl.where(seen, s, float("-inf"))
            peak, mass, acc = add_tile(s, scale, values, v_factor, peak, mass, acc, VALUES)
            if count % TILES == TILES - 1:
                total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
                peak = tl.full((BM,), float("-inf"), tl.float32)
                mass = tl.zeros((BM, 8), tl.float32)
                acc = tl.zeros((BM, BD), tl.float32)
        total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
        if tailed(KEYS, VALUES):  # noqa: SIM102
            if tail != 0:
                peak = tl.full((BM,), float("-inf"), tl.float32)
                mass = tl.zeros((BM, 8), tl.float32)
                acc = tl.zeros((BM, BD), tl.float32)
                for base in range(first_end, last + 1, OWN):
                    key = base + tl.arange(0, OWN)
                    wanted = (key <= last) & ((key > lowest - window) | (key < pinned))
                    block = block_of(table, shift, row, key, wanted, table_width, block_size, pinned_blocks)
                    in_table = block * row_block + (key % block_size).to(tl.int64) * row_slot + stored_head * row_head
                    is_new, cell = key >= oldest, (start + key - oldest)
                    old = (2 * row + base // OWN % 2) * tail_block + tl.arange(0, OWN) * tail_slot
                    new = cell // OWN * tail_block + cell % OWN * tail_slot
                    place = tl.where(is_new, new, old) + stored_head * tail_head
                    keys, k_factor = load_own(
                        *(k, k_scale, tl.where(is_new, k_new, k_tail), tl.where(is_new, k_new_scale, k_tail_scale)),
                        *(in_table, place, wanted, k_width, k_codec, KEYS, BD),
                    )
                    values, v_factor = load_own(
                        *(v, v_scale, tl.where(is_new, v_new, v_tail), tl.where(is_new, v_new_scale, v_tail_scale)),
                        *(in_table, place, wanted, v_width, v_codec, VALUES, BD),
                    )
                    s = scored(query, keys, k_factor, KEYS)
                    s, values, v_factor = only_finite(s, values, v_factor, VALUES)
                    seen = seen_by(pos[:, None], key[None, :], window, pinned) & (key[None, :] >= end[:, None])
                    s = tl.where(seen, s, float("-inf"))
                    peak, mass, acc = add_tile(s, scale, values, v_factor, peak, mass, acc, VALUES)
                total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
        mass = tl.max(total_mass, 1)[:, None]
        result = turned_back(tl.div_rn(total, tl.broadcast_to(mass, total.shape)), v_codec, VALUES)
        column = (stored_head * group + member % group)[:, None] * dim + d[None, :]
        inside = mine[:, None] & (d < dim)[None, :]
        store_in_form(form, out, (start + member // group)[:, None] * out_stride + column, result, inside)
