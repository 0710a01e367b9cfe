"""Moving cells: encoding this step's keys and values into place, copying blocks.

A write touches the cells that the table names and no others. Bytes are counted here, where they move.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.codec import Cells, Floats
from kvarn.cache.placement import Copy
from kvarn.cache.view import Store, Table


def write(k: Floats, v: Floats, store: Store, table: Table) -> None:
    used = np.flatnonzero(table.slots >= 0)  # -1 is padding
    block, slot = np.divmod(table.slots[used], store.block_size)
    panel, slot = np.divmod(slot, store.panel_size)
    for x, cells, scales in ((k, store.k, store.k_scale), (v, store.v, store.v_scale)):
        fresh, scale = encode(x[used], store)
        cells[block, panel, :, slot] = fresh  # [T, head, dim]
        store.counters.written += fresh.nbytes
        if scales is not None and scale is not None:
            scales[block, panel, :, slot] = scale  # [T, head]
            store.counters.written += scale.nbytes


def encode(x: Floats, store: Store) -> Cells:
    """[T, n_kv_heads, dim] -> cells [T, stored heads, dim] and scales [T, stored heads]."""
    tokens, heads, dim = x.shape
    cells, scales = store.codec.encode(x.reshape(tokens * heads, dim))
    copies = store.n_heads // heads
    cells = repeat_heads(cells.reshape(tokens, heads, dim), copies)
    return Cells(cells, None if scales is None else repeat_heads(scales.reshape(tokens, heads), copies))


def repeat_heads(x: NDArray[Any], copies: int) -> NDArray[Any]:
    """Each head (axis 1) `copies` times in a row: what query heads of one group see."""
    return x if copies == 1 else np.repeat(x, copies, axis=1)


def copy(copies: Sequence[Copy], store: Store) -> None:
    for src, dst, slots in copies:
        for cells in (store.k, store.v, store.k_scale, store.v_scale):
            if cells is not None:
                for part in _first(slots, store.panel_size):
                    cells[dst][part] = cells[src][part]
                    store.counters.copied += cells[dst][part].nbytes


def _first(slots: int, panel_size: int) -> Iterator[tuple[slice | int, ...]]:
    """Index of a block's first slots: whole panels, then a part of one."""
    panels, rest = divmod(slots, panel_size)
    if panels:
        yield (slice(panels),)
    if rest:
        yield (panels, slice(None), slice(rest))
