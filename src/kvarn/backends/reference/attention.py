"""Reference attention over Store and Table.

The bits of a row depend only on its query and on the keys that it may see. They do not depend on the
other rows of the step, or on the place and size of the blocks. Every sum is computed by
kvarn.arithmetic, in order of ascending position:

    s = q . k * scale        m = max s        p = exp(s - m)        out = sum(p v) / sum(p)

The sums leave out the keys that a row may not see, so the content of these keys has no effect. Cells are
decoded first; everything is f32. Non-goal: speed.
"""

from typing import Any

import numpy as np

from kvarn.arithmetic import dots, exp, weigh
from kvarn.arrays import Cells, Floats
from kvarn.backends.host import Store, Table
from kvarn.backends.reference.codecs import DEFINITIONS, Encoded
from kvarn.cache.spec import LayerSpec

ROWS = 64  # queries per block: limits the memory for scores


def prefill(q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
    store.counters.calls["prefill"] += 1
    new = np.diff(table.q_start)
    for row in np.flatnonzero(new > 1):
        _attend_sequence(q, store, table, spec, scale, out, row)


def decode(q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
    """Computes the same bits as the same row in `prefill`."""
    store.counters.calls["decode"] += 1
    new = np.diff(table.q_start)
    for row in np.flatnonzero(new == 1):
        _attend_sequence(q, store, table, spec, scale, out, row)


def _attend_sequence(
    q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats, row: np.intp
) -> None:
    start, stop = int(table.q_start[row]), int(table.q_start[row + 1])
    length = int(table.kv_len[row])
    if not length:  # no keys
        out[start:stop] = 0
        return
    first = length - (stop - start)  # position of the first query
    keys = _Staged(store, table, spec, row, first)
    for low in range(start, stop, ROWS):
        high = min(low + ROWS, stop)
        out[low:high] = _attend_rows(q[low:high], first + low - start, keys, spec, np.float32(scale))


class _Staged:
    """The keys and values that the rows of this step may see, decoded to f32, in ascending position.

    Other cells are not read, because they may hold anything, for example NaN."""

    def __init__(self, store: Store, table: Table, spec: LayerSpec, row: np.intp, first: int) -> None:
        length = int(table.kv_len[row])
        n = table.n_blocks[row]
        slot = np.arange(min(store.block_size, length))
        pos = (table.first[row, :n, None] + slot).ravel()
        block = np.repeat(table.blocks[row, :n], len(slot))
        slot = np.tile(slot, n)
        wanted = (pos < length) & spec.visible(np.maximum(pos, first), pos)  # if any row sees a key, the first one does
        everything = np.arange(length)
        assert wanted.sum() == spec.visible(np.maximum(everything, first), everything).sum(), "a visible key is missing"
        self.pos, block, slot = pos[wanted], block[wanted], slot[wanted]
        cell = (block, slot // store.panel_size, slice(None), slot % store.panel_size)
        k, v = (
            Encoded(_read(cells, cell, store), None if scales is None else _read(scales, cell, store))
            for cells, scales in ((store.k, store.k_scale), (store.v, store.v_scale))
        )
        self.k = DEFINITIONS[store.codec.k.name].decode(k, spec.k_dim)  # [head, keys, dim]
        self.v = DEFINITIONS[store.codec.v.name].decode(v, spec.v_dim)


def _read(cells: Cells, cell: tuple[Any, ...], store: Store) -> Cells:
    """[head, keys, unit], or [head, keys] of scales."""
    read = cells[cell]
    store.counters.read += read.nbytes
    return np.ascontiguousarray(read.swapaxes(0, 1))


def _attend_rows(rows: Floats, first: int, keys: _Staged, spec: LayerSpec, scale: np.float32) -> Floats:
    """Queries [T, n_heads, dim] at positions first, first + 1, ..."""
    used = slice(0, int(np.searchsorted(keys.pos, first + len(rows))))
    heads, group = len(keys.k), rows.shape[1] // len(keys.k)
    q = rows.reshape(len(rows), heads, group, -1).transpose(1, 2, 0, 3)  # [head, group, T, dim]
    seen = spec.visible((first + np.arange(len(rows)))[:, None], keys.pos[used])  # [T, keys]
    seen = np.tile(seen, (group, 1))  # [group * T, keys]

    with np.errstate(invalid="ignore", over="ignore"):  # a key that is not finite affects only the rows that see it
        s = dots(q.reshape(heads, group * len(rows), -1), keys.k[:, used]) * scale  # [head, group * T, keys]
        s = np.where(seen, s, np.float32(-np.inf))
        m = s.max(-1, keepdims=True)  # if it is -infinity, use 0: then every p is 0
        p = exp((s - np.where(np.isneginf(m), np.float32(0), m)).astype(np.float64)).astype(np.float32)
        denominator = weigh(p, seen, np.ones((heads, p.shape[-1], 1), np.float32))
        total = weigh(p, seen, keys.v[:, used])
        result = np.divide(total, denominator, out=np.zeros_like(total), where=denominator != 0)
    return result.reshape(heads, group, len(rows), -1).transpose(2, 0, 1, 3).reshape(*rows.shape[:2], -1)
