"""Attention of sequences with several new tokens: BM query rows of one KV head of one sequence per program.

A row is a pair (token, query head of the KV head). The program goes through the splits that its rows
see, in order, and adds them as `reduce` does. A row has the same bits as in `decode`. The result is in the
form that the output matrix takes.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.attention import (
    add_tile,
    first_split,
    folded,
    load_tile,
    only_finite,
    seen_by,
    with_sign,
)
from kvarn.backends.cuda.kernels.early import wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def prefill(
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
    starts,
    counts,
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
    stored_head = tl.program_id(1)
    start = tl.load(starts + tl.program_id(2)).to(tl.int64)
    n_rows = tl.load(counts + tl.program_id(2)) * group
    begin = tl.program_id(0) * BM
    if begin < n_rows:
        member = begin + tl.arange(0, BM)
        mine = member < n_rows
        lowest = tl.load(positions + start) + begin // group
        last = tl.load(positions + start) + (tl.minimum(begin + BM, n_rows) - 1) // group
        pos = tl.load(positions + start) + member // group
        line = ((start + member // group) * n_heads + stored_head * group + member % group)[:, None] * dim
        row = tl.load(rows + start).to(tl.int64)
        shift = tl.load(shifts + row)
        d = tl.arange(0, BD)
        inside = mine[:, None] & (d < dim)[None, :]
        query = tl.load(q + line + d[None, :], mask=inside, other=0.0)
        query, scale = with_sign(query, scale)
        pins, first = first_split(lowest, window, pinned, SPLIT)
        total_peak = tl.full((BM,), float("-inf"), tl.float32)
        total_mass = tl.zeros((BM, 8), tl.float32)
        total = tl.zeros((BM, BD), tl.float32)
        peak, mass, acc = total_peak, total_mass, total
        before = pins + last // SPLIT - first  # splits before the last one
        for count in range(before * (SPLIT // TILE) + last % SPLIT // TILE + 1):
            index = count // (SPLIT // TILE)
            split = tl.where(index < pins, index, first + index - pins)
            base = split * SPLIT + count % (SPLIT // TILE) * TILE
            key = base + tl.arange(0, TILE)
            wanted = (key <= last) & ((key > lowest - window) | (key < pinned))  # by any of the rows
            logical = key // block_size
            entry = tl.where(logical < pinned_blocks, logical, logical - shift)
            block = tl.load(table + row * table_width + entry, mask=wanted, other=0).to(tl.int64)
            slot = (key - logical * block_size).to(tl.int64)
            keys = load_tile(k, block, slot, wanted, stored_head, d, dim, k_block, k_slot, k_head)
            values = load_tile(v, block, slot, wanted, stored_head, d, dim, v_block, v_slot, v_head)
            s = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if (base + TILE > lowest) | (base <= last - window):  # some rows may not see some of these keys
                s, values = only_finite(s, values)
                s = tl.where(seen_by(pos[:, None], key[None, :], window, pinned), s, float("-inf"))
            peak, mass, acc = add_tile(s, scale, values, peak, mass, acc)
            if count % (SPLIT // TILE) == SPLIT // TILE - 1:
                total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
                peak = tl.full((BM,), float("-inf"), tl.float32)
                mass = tl.zeros((BM, 8), tl.float32)
                acc = tl.zeros((BM, BD), tl.float32)
        total_peak, total_mass, total = folded(total_peak, total_mass, total, peak, mass, acc)
        mass = tl.max(total_mass, 1)[:, None]
        result = tl.div_rn(total, tl.broadcast_to(mass, total.shape))
        column = (stored_head * group + member % group)[:, None] * dim + d[None, :]
        store_in_form(form, out, (start + member // group)[:, None] * out_stride + column, result, inside)
