"""What a backend gives the cache and, through it, a model: memory, views of it, and the attention kernels.

The signatures are frozen: a kernel takes Store, Table, LayerSpec and the scale. A feature that does not fit gets a
kernel of its own, chosen by name, not a flag.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.codec import Floats
from kvarn.cache.placement import Copy
from kvarn.cache.spec import LayerSpec
from kvarn.cache.view import Store, Table


class Backend(ABC):
    name: str
    default_layout: str

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """A zeroed arena, aligned to a cache line."""

    @abstractmethod
    def view(self, arena: Any, offset: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Part of the arena as an array, in place; strides count elements."""

    @abstractmethod
    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        """Encode this step's keys and values, [T, n_kv_heads, dim], into the cells that the table names."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy], store: Store) -> None:
        """Copy cells from block to block, in order."""

    @abstractmethod
    def prefill(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        """Rows of the sequences with more than one new token; q and out are [T, n_heads, dim]."""

    @abstractmethod
    def decode(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        """Rows of the sequences with exactly one new token."""

    def attend(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float) -> Floats:
        """Each kernel is called when it has rows, and not otherwise. Padding rows stay zero."""
        out = np.zeros_like(q)
        new: NDArray[np.int32] = np.diff(table.q_start)
        seconds, start = store.counters.seconds, time.perf_counter()
        if (new > 1).any():
            self.prefill(q, store, table, spec, scale, out)
            now = time.perf_counter()
            seconds["prefill"] += now - start
            start = now
        if (new == 1).any():
            self.decode(q, store, table, spec, scale, out)
            seconds["decode"] += time.perf_counter() - start
        return out
