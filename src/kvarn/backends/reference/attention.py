"""Reference attention over Store and Table.

The bits of a row depend only on its query and on the keys that it may see. They do not depend on the
other rows of the step, or on the place and size of the blocks. Every sum is computed by
kvarn.arithmetic, in order of ascending position:

    s = q . k * scale        m = max s        p = exp(s - m)        out = sum(p v) / sum(p)

The sums leave out the keys that a row may not see, so the content of these keys has no effect. Cells are
decoded first; everything is f32. Non-goal: speed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvarn.arithmetic import dots, exp, weigh
from kvarn.arrays import Cells, Floats
from kvarn.backends.host import Store, Table
from kvarn.backends.reference.codecs import DEFINITIONS, Encoded
from kvarn.cache.codec import TILE, Codec
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
    for low, high in _spans(first, length, TILE if store.codec.tail else ROWS):
        rows = slice(start + low - first, start + high - first)
        out[rows] = _attend_rows(q[rows], low, keys, spec, np.float32(scale))


def _spans(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The positions from `first` to `end`, divided at multiples of `size`."""
    while first < end:
        after = min(first // size * size + size, end)
        yield first, after
        first = after


class _Staged:
    """The keys and values that the rows of this step may see, decoded to f32, in ascending position.

    Other cells are not read, because they may hold anything, for example NaN. Rows of a codec with a tail read the
    positions of their own tile in int8: cells are staged up to the last tile, int8 rows from the first tile on."""

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
        self.pos, self._block, self._slot = pos[wanted], block[wanted], slot[wanted]
        self._store = store
        self._row, self._first = int(row), first
        self._k, self._v = self._stage("k", store.codec.k, spec.k_dim), self._stage("v", store.codec.v, spec.v_dim)

    def of(self, first: int, last: int) -> tuple[Floats, Floats]:
        """K and V [head, keys, dim] of the positions up to `last`, for queries from `first` to `last`."""
        tile, end = (int(np.searchsorted(self.pos, at)) for at in (first // TILE * TILE, last + 1))
        k, v = (
            cells[:, :end]
            if own is None
            else np.concatenate((cells[:, :tile], own[:, : end - before][:, tile - before :]), 1)
            for cells, own, before in (self._k, self._v)
        )
        return k, v

    def _stage(self, name: str, codec: Codec, dim: int) -> tuple[Floats, Floats | None, int]:
        """Decoded cells; for a codec with a tail also the int8 rows, and the number of keys before them."""
        last, begin = ((int(at) // TILE * TILE) for at in (self.pos[-1], self._first))
        stop = int(np.searchsorted(self.pos, last)) if codec.tail else len(self.pos)
        store, block, slot = self._store, self._block[:stop], self._slot[:stop]
        cell = (block, slot // store.panel_size, slice(None), slot % store.panel_size)
        cells, scales = getattr(store, name), getattr(store, f"{name}_scale")
        encoded = Encoded(_read(cells, cell, store), None if scales is None else _read(scales, cell, store))
        decoded = DEFINITIONS[codec.name].decode(encoded, dim)
        if not codec.tail:
            return decoded, None, 0
        assert store.tail is not None
        before, rows = int(np.searchsorted(self.pos, begin)), store.tail.own[self._row, name]
        place = (self.pos[before:] - begin,)
        own = Encoded(_read(rows.cells, place, store), _read(rows.scales, place, store))
        return decoded, DEFINITIONS["int8"].decode(own, dim), before


def _read(cells: Cells, cell: tuple[Any, ...], store: Store) -> Cells:
    """[head, keys, unit], or [head, keys, ...] of scales."""
    read = cells[cell]
    store.counters.read += read.nbytes
    return np.ascontiguousarray(read.swapaxes(0, 1))


def _attend_rows(rows: Floats, first: int, keys: _Staged, spec: LayerSpec, scale: np.float32) -> Floats:
    """Queries [T, n_heads, dim] at positions first, first + 1, ..."""
    used = slice(0, int(np.searchsorted(keys.pos, first + len(rows))))
    k, v = keys.of(first, first + len(rows) - 1)
    heads, group = len(k), rows.shape[1] // len(k)
    q = rows.reshape(len(rows), heads, group, -1).transpose(1, 2, 0, 3)  # [head, group, T, dim]
    seen = spec.visible((first + np.arange(len(rows)))[:, None], keys.pos[used])  # [T, keys]
    seen = np.tile(seen, (group, 1))  # [group * T, keys]

    with np.errstate(invalid="ignore", over="ignore"):  # a key that is not finite affects only the rows that see it
        s = dots(q.reshape(heads, group * len(rows), -1), k) * scale  # [head, group * T, keys]
        s = np.where(seen, s, np.float32(-np.inf))
        m = s.max(-1, keepdims=True)  # if it is -infinity, use 0: then every p is 0
        p = exp((s - np.where(np.isneginf(m), np.float32(0), m)).astype(np.float64)).astype(np.float32)
        denominator = weigh(p, seen, np.ones((heads, p.shape[-1], 1), np.float32))
        total = weigh(p, seen, v)
        result = np.divide(total, denominator, out=np.zeros_like(total), where=denominator != 0)
    return result.reshape(heads, group, len(rows), -1).transpose(2, 0, 1, 3).reshape(*rows.shape[:2], -1)
