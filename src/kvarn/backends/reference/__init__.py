"""The reference backend: NumPy, slow, obviously right. It ships, and is the oracle for every other backend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvarn.backends.base import Backend
from kvarn.backends.reference import attention, cells
from kvarn.cache.codec import Floats
from kvarn.cache.placement import Copy
from kvarn.cache.plan import ALIGNMENT
from kvarn.cache.spec import LayerSpec
from kvarn.cache.view import Store, Table


class Reference(Backend):
    name = "reference"
    default_layout = "token-major"

    def allocate(self, nbytes: int) -> Any:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)  # pages are backed by memory when they are first written
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def view(self, arena: Any, offset: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int]) -> Any:
        return as_strided(arena[offset:].view(dtype), shape, [s * dtype.itemsize for s in strides])

    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        cells.write(k, v, store, table)

    def copy(self, copies: Sequence[Copy], store: Store) -> None:
        cells.copy(copies, store)

    def prefill(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        attention.prefill(q, store, table, spec, scale, out)

    def decode(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        attention.decode(q, store, table, spec, scale, out)
