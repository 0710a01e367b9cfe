"""Reference attention over Store and Table.

One row's bits depend on its own query, on the keys it may see and on nothing else: not on the other rows of the batch
or the chunk, not on where blocks lie, not on their size. To that end

- a query at position p always stands in row p % ROW_TILE of a tile, and a key at position p always in column
  p % KEY_TILE: a matrix product has one shape and every row and column its one place in it (BLAS may round rows
  differently in different places and shapes);
- tiles are walked in ascending position and skipped by visibility only, never by residency;
- the maximum is taken first, over all visible keys, so that no rescaling depends on how keys were grouped;
- sums start at +0, so that a tile which adds only zeros changes nothing.

int8 scales multiply scores and fold into probabilities; all else is f32. Non-goal: speed.
"""

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.codec import Floats
from kvarn.cache.spec import LayerSpec
from kvarn.cache.view import Store, Table

ROW_TILE = 16
KEY_TILE = 64


def prefill(q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
    store.counters.calls["prefill"] += 1
    new = np.diff(table.q_start)
    for row in np.flatnonzero(new > 1):
        _attend_sequence(q, store, table, spec, scale, out, row)


def decode(q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
    """A decode is the prefill kernel's row."""
    store.counters.calls["decode"] += 1
    new = np.diff(table.q_start)
    for row in np.flatnonzero(new == 1):
        _attend_sequence(q, store, table, spec, scale, out, row)


def _attend_sequence(
    q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats, row: np.intp
) -> None:
    start, stop = table.q_start[row], table.q_start[row + 1]
    length = int(table.kv_len[row])
    if not length:  # an empty sequence has nothing to attend to
        out[start:stop] = 0
        return
    first = length - int(stop - start)  # position of the first query
    keys = _Staged(store, table, spec, row, first)
    for tile in range(first // ROW_TILE * ROW_TILE, length, ROW_TILE):
        low, high = max(tile, first), min(tile + ROW_TILE, length)
        rows = np.zeros((ROW_TILE, *q.shape[1:]), np.float32)  # [16, n_heads, dim]
        rows[low - tile : high - tile] = q[start + low - first : start + high - first]
        result = _attend_tile(rows, tile, keys, spec, np.float32(scale))
        out[start + low - first : start + high - first] = result[low - tile : high - tile]


class _Staged:
    """The keys and values that some row of this step may see, widened, in tiles at absolute positions.

    Cells that are not visible are not read: they may hold anything, NaN included."""

    def __init__(self, store: Store, table: Table, spec: LayerSpec, row: np.intp, first: int) -> None:
        length = int(table.kv_len[row])
        n = table.n_blocks[row]
        slot = np.arange(min(store.block_size, length))
        pos = (table.first[row, :n, None] + slot).ravel()
        block = np.repeat(table.blocks[row, :n], len(slot))
        slot = np.tile(slot, n)
        wanted = (pos < length) & spec.visible(np.maximum(pos, first), pos)  # the first row to see it, if any does
        everything = np.arange(length)
        assert wanted.sum() == spec.visible(np.maximum(everything, first), everything).sum(), "a visible key is missing"
        pos, block, slot = pos[wanted], block[wanted], slot[wanted]

        tiles = np.unique(pos // KEY_TILE)
        self.pos = (tiles[:, None] * KEY_TILE + np.arange(KEY_TILE)).astype(np.int64)  # [tiles, 64]
        place = np.searchsorted(tiles, pos // KEY_TILE), pos % KEY_TILE
        cell = (block, slot // store.panel_size, slice(None), slot % store.panel_size)
        shape = (store.n_heads, len(tiles), KEY_TILE)
        self.k = np.zeros((*shape, store.k.shape[-1]), np.float32)  # [head, tiles, 64, dim]
        self.v = np.zeros_like(self.k)
        self.k_scale = self.v_scale = None
        for staged, cells in ((self.k, store.k), (self.v, store.v)):
            read = cells[cell]  # [keys, head, dim]
            store.counters.read += read.nbytes
            staged[:, *place] = store.codec.widen(read).swapaxes(0, 1)
        if store.k_scale is not None and store.v_scale is not None:
            self.k_scale, self.v_scale = np.zeros((2, *shape), np.float32)
            for staged, scales in ((self.k_scale, store.k_scale), (self.v_scale, store.v_scale)):
                read = scales[cell]
                store.counters.read += read.nbytes
                staged[:, *place] = read.T
        self.finite = bool(np.isfinite(self.v).all())


def _attend_tile(rows: Floats, tile: int, keys: _Staged, spec: LayerSpec, scale: np.float32) -> Floats:
    """Queries at positions tile..tile+15 (rows beyond the step hold zeros and are ignored by the caller)."""
    used = slice(0, int(np.searchsorted(keys.pos[:, 0], tile + ROW_TILE)))  # tiles that start above every row
    heads, group = len(keys.k), rows.shape[1] // len(keys.k)
    seen = spec.visible((tile + np.arange(ROW_TILE))[:, None], keys.pos[used, None])  # [tiles, 16, 64]
    q = rows.reshape(ROW_TILE, heads, group, 1, -1).transpose(1, 2, 3, 0, 4)  # [head, group, 1, 16, dim]
    q = np.ascontiguousarray(q)

    with np.errstate(invalid="ignore", over="ignore"):  # keys that are not finite poison the rows that see them, only
        s = q @ keys.k[:, None, used].swapaxes(-1, -2) * scale  # [head, group, tiles, 16, 64]
        if keys.k_scale is not None:
            s *= keys.k_scale[:, None, used, None]
        s = np.where(seen, s, np.float32(-np.inf))
        m = s.max((2, 4), keepdims=True)
        p = np.exp(s - np.where(np.isneginf(m), np.float32(0), m))
        sums = p.sum(-1)  # [head, group, tiles, 16]
        if keys.v_scale is not None:
            p = np.where(seen, p * keys.v_scale[:, None, used, None], np.float32(0))
        parts = _times_v(p, keys, used, seen)  # [head, group, tiles, 16, dim]

    denominator = np.zeros((heads, group, ROW_TILE), np.float32)
    total = np.zeros((heads, group, ROW_TILE, parts.shape[-1]), np.float32)
    for t in range(parts.shape[2]):  # ascending, one after the other
        denominator += sums[:, :, t]
        total += parts[:, :, t]
    result = np.divide(total, denominator[..., None], out=np.zeros_like(total), where=denominator[..., None] != 0)
    return result.transpose(2, 0, 1, 3).reshape(rows.shape)


def _times_v(p: Floats, keys: _Staged, used: slice, seen: NDArray[np.bool_]) -> Floats:
    v = keys.v[:, None, used]  # [head, 1, tiles, 64, dim]
    if keys.finite:
        return p @ v
    # 0 x NaN is NaN: a value that is not finite must not reach the rows that may not see it. Row by row, then.
    parts = np.empty((*p.shape[:-1], v.shape[-1]), np.float32)
    for row in range(ROW_TILE):
        parts[:, :, :, row] = (p @ np.where(seen[:, row, :, None], v, np.float32(0)))[:, :, :, row]
    return parts
