"""The memory of a cache for native kernels: a record of pointers, made once per cache."""

import numpy as np

from kvarn import native
from kvarn.arrays import Floats
from kvarn.backends.base import Counters
from kvarn.backends.host import HostMemory, Store, Table
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step


class CpuMemory:
    """`host` has the arena and the tables; `view` points into them. Only the cells to write change per step."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self.view = native.CacheView()
        for table, group in zip(host.tables, host.plan.groups, strict=True):
            _add_group(self.view, table, group.config.spec)
        for store, index in zip(host.stores, host.group_of, strict=True):
            _add_layer(self.view, store, host.plan.groups[index].config.spec.k_dim, index)

    @property
    def counters(self) -> Counters:
        return self.host.counters

    def apply(self, step: Step) -> None:
        self.host.apply(step)
        for group, table in enumerate(self.host.tables):
            self.view.set_cells(group, table.cells)

    def read_block(self, group: int, block: int) -> bytes:
        return self.host.read_block(group, block)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        self.host.write_block(group, block, data)


class CpuKernels:
    """The kernels, one call each. A program calls them from native code, for all layers in one call."""

    def __init__(self, pool: native.Pool) -> None:
        self._pool = pool
        self._fresh = native.FreshRows()  # int8 rows of the last write, which the attention of its layer and step reads

    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        spec = LayerSpec(store.n_heads, k.shape[1], k.shape[2], v.shape[2])  # a write does not look at the window
        store.counters.written += _view(store, table, spec).write(0, k, v, self._fresh)

    def prefill(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        store.counters.calls["prefill"] += 1
        self._attend(q, store, table, spec, scale, out, prefill=True)

    def decode(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        store.counters.calls["decode"] += 1
        self._attend(q, store, table, spec, scale, out, prefill=False)

    def _attend(
        self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats, prefill: bool
    ) -> None:
        view = _view(store, table, spec)
        store.counters.read += native.attend(self._pool, view, 0, q, out, scale, prefill, not prefill, self._fresh)


def _view(store: Store, table: Table, spec: LayerSpec) -> native.CacheView:
    view = native.CacheView()
    _add_group(view, table, spec)
    _add_layer(view, store, spec.k_dim, 0)
    view.set_cells(0, np.ascontiguousarray(table.cells))
    return view


def _add_group(view: native.CacheView, table: Table, spec: LayerSpec) -> None:
    window = -1 if spec.window is None else spec.window
    tables = (table.blocks, table.first, table.n_blocks, table.kv_len, table.q_start)
    view.add_group(*tables, spec.n_heads, spec.n_kv_heads, window, spec.pinned)


def _add_layer(view: native.CacheView, store: Store, dim: int, group: int) -> None:
    k, v = (native.Codec[codec.name] for codec in (store.codec.k, store.codec.v))
    tail = store.tail
    tails = (None,) * 4 if tail is None else (tail.k, tail.v, tail.k_scale, tail.v_scale)
    view.add_layer(store.k, store.v, store.k_scale, store.v_scale, *tails, k, v, dim, group)
