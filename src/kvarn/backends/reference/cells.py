"""Encodes this step's keys and values and writes them into the cells that the table names."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Floats
from kvarn.backends.host import Store, Table
from kvarn.backends.reference.codecs import DEFINITIONS, Encoded
from kvarn.cache.codec import Codec


def write(k: Floats, v: Floats, store: Store, table: Table) -> None:
    used = np.flatnonzero(table.cells >= 0)  # -1 is padding
    block, slot = np.divmod(table.cells[used], store.block_size)
    panel, slot = np.divmod(slot, store.panel_size)
    for x, cells, scales, codec in (
        (k, store.k, store.k_scale, store.codec.k),
        (v, store.v, store.v_scale, store.codec.v),
    ):
        fresh, scale = encode(x[used], store.n_heads, codec)
        cells[block, panel, :, slot] = fresh  # [T, head, unit]
        store.counters.written += fresh.nbytes
        if scales is not None and scale is not None:
            scales[block, panel, :, slot] = scale  # [T, head]
            store.counters.written += scale.nbytes


def encode(x: Floats, stored_heads: int, codec: Codec) -> Encoded:
    """[T, n_kv_heads, dim] -> cells [T, stored heads, unit] and scales [T, stored heads]."""
    tokens, heads, dim = x.shape
    cells, scales = DEFINITIONS[codec.name].encode(x.reshape(tokens * heads, dim))
    copies = stored_heads // heads
    cells = repeat_heads(cells.reshape(tokens, heads, -1), copies)
    return Encoded(cells, None if scales is None else repeat_heads(scales.reshape(tokens, heads), copies))


def repeat_heads(x: NDArray[Any], copies: int) -> NDArray[Any]:
    """Repeat each head (axis 1) `copies` times, once per query head of its group."""
    return x if copies == 1 else np.repeat(x, copies, axis=1)
