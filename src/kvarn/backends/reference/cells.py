"""Encodes this step's keys and values and writes them into the cells that the table names.

A codec with a tail gets its new rows in int8. They go to the tail. The cells of a tile are made from its
int8 rows in the step that writes its last position.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Cells, Floats
from kvarn.backends.host import Rows, Store, Table, Tail
from kvarn.backends.reference.codecs import DEFINITIONS, PACKED, Encoded
from kvarn.cache.codec import TILE, Codec


def write(k: Floats, v: Floats, store: Store, table: Table) -> None:
    for name, x, codec in (("k", k, store.codec.k), ("v", v, store.codec.v)):
        if codec.tail:
            _write_tiles(name, x, store, table, codec)
        else:
            used = np.flatnonzero(table.cells >= 0)  # -1 is padding
            _put(name, encode(x[used], store.n_heads, codec), store, table.cells[used])


def _put(name: str, rows: Encoded, store: Store, at: NDArray[np.int64]) -> None:
    """Write rows [T, head, ...] to these cells of K or V."""
    block, slot = np.divmod(at, store.block_size)
    panel, slot = np.divmod(slot, store.panel_size)
    for array, fresh in ((getattr(store, name), rows.cells), (getattr(store, f"{name}_scale"), rows.scales)):
        if array is not None and fresh is not None:
            array[block, panel, :, slot] = fresh
            store.counters.written += fresh.nbytes


def encode(x: Floats, stored_heads: int, codec: Codec) -> Encoded:
    """[T, n_kv_heads, dim] -> cells [T, stored heads, unit] and scales [T, stored heads, ...]."""
    tokens, heads, dim = x.shape
    cells, scales = DEFINITIONS[codec.name].encode(x.reshape(tokens * heads, dim))
    copies = stored_heads // heads
    cells = repeat_heads(cells.reshape(tokens, heads, -1), copies)
    return Encoded(cells, None if scales is None else repeat_heads(scales.reshape(tokens, heads), copies))


def repeat_heads(x: NDArray[Any], copies: int) -> NDArray[Any]:
    """Repeat each head (axis 1) `copies` times, once per query head of its group."""
    return x if copies == 1 else np.repeat(x, copies, axis=1)


def _write_tiles(name: str, x: Floats, store: Store, table: Table, codec: Codec) -> None:
    assert store.tail is not None
    for row in np.flatnonzero(np.diff(table.q_start)):
        start, stop, end = int(table.q_start[row]), int(table.q_start[row + 1]), int(table.kv_len[row])
        if not end:  # padding
            continue
        tail, first = _TailOf(name, store.tail, int(row)), end - (stop - start)
        cells, scales = encode(
            x[start:stop], store.n_heads, store.codec.tails.k if name == "k" else store.codec.tails.v
        )
        assert scales is not None
        store.counters.written += cells.nbytes + scales.nbytes
        own = tail.joined(first, Rows(cells, scales))
        begin = first // TILE * TILE
        for tile in range(begin, end - TILE + 1, TILE):
            rows = slice(tile - begin, tile - begin + TILE)
            packed = PACKED[codec.name].made(Encoded(own.cells[rows], own.scales[rows]))
            last = table.cells[start + tile + TILE - 1 - first]  # a tile is in one block
            _put(name, packed, store, np.arange(last - TILE + 1, last + 1))
        tail.keep(own, begin, end)
        store.tail.own[int(row), name] = own


class _TailOf:
    """The tail of K or V of one sequence. Tile t is in block 2 row + t % 2."""

    def __init__(self, name: str, tail: Tail, row: int) -> None:
        self._cells: Cells = getattr(tail, name)
        self._scales: Floats = getattr(tail, f"{name}_scale")
        self._row = row

    def joined(self, first: int, fresh: Rows) -> Rows:
        """The new rows, from position `first` on, after those of the same tile that were there before."""
        slots = slice(0, first % TILE)
        cells, scales = (x[self._block(first // TILE), 0][:, slots] for x in (self._cells, self._scales))
        return Rows(
            np.concatenate((cells.swapaxes(0, 1), fresh.cells)), np.concatenate((scales.swapaxes(0, 1), fresh.scales))
        )

    def keep(self, own: Rows, begin: int, end: int) -> None:
        """The last two tiles of these rows, from position `begin` on."""
        last = (end - 1) // TILE
        for tile in range(max(last - 1, begin // TILE), last + 1):
            rows = slice(tile * TILE - begin, min((tile + 1) * TILE, end) - begin)
            slots = slice(0, rows.stop - rows.start)
            self._cells[self._block(tile), 0][:, slots] = own.cells[rows].swapaxes(0, 1)
            self._scales[self._block(tile), 0][:, slots] = own.scales[rows].swapaxes(0, 1)

    def _block(self, tile: int) -> int:
        return 2 * self._row + tile % 2
