"""The CPU backend: native kernels over the cache where it lies, and models recorded into native programs.

`Cpu` is the cache's side (memory, views, write, prefill, decode); `program.py` is the model's. Both use one pool of
threads. Instruction sets are chosen at run time (kvarn.isa).
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvarn import isa
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.cache.spec import LayerSpec
from kvarn.cache.view import Store, Table
from kvarn.errors import KvarnError

MOST_THREADS = 1024
CODECS = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}  # as native/view.hpp numbers them


def default_threads() -> int:
    """Physical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(physical_cores(os.sched_getaffinity(0))))
    return os.cpu_count() or 1


def physical_cores(cpus: Sequence[int] | set[int]) -> set[str]:
    cores = set()
    for cpu in cpus:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path) as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return cores


def make_pool(threads: int | None) -> isa.Pool:
    if threads is not None and threads < 1:
        raise KvarnError(f"{threads} threads; it must be at least 1")
    if threads is not None and threads > MOST_THREADS:
        raise KvarnError(f"{threads} threads; {MOST_THREADS} is the most")
    return isa.native.Pool(threads or default_threads())


class Cpu(Reference):
    """Memory, views and copies are the reference's; what computes is native."""

    name = "cpu"
    default_layout = "columns"

    def __init__(self, pool: isa.Pool | None = None) -> None:
        self.pool = pool or make_pool(None)

    def allocate(self, nbytes: int) -> Any:
        return isa.native.arena(nbytes)  # in large pages: a tile of keys is a page of the small kind

    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        spec = LayerSpec(store.n_heads, k.shape[1], k.shape[2])  # what is seen does not matter to a write
        store.counters.written += _view(store, table, spec).write(0, k, v)

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
        store.counters.read += isa.native.attend(self.pool, view, 0, q, out, scale, prefill, not prefill)


def view_of(cache: KVCache) -> isa.CacheView:
    """The whole cache as kernels see it. Slots change with every step; all else is persistent."""
    view = isa.native.CacheView()
    for table, group in zip(cache.tables, cache.plan.groups, strict=True):
        _add_group(view, table, group.geometry.spec)
    for layer, store in enumerate(cache.stores):
        group_index = next(i for i, group in enumerate(cache.plan.groups) if layer in group.layers)
        view.add_layer(store.k, store.v, store.k_scale, store.v_scale, CODECS[store.codec.name], group_index)
    return view


def _view(store: Store, table: Table, spec: LayerSpec) -> isa.CacheView:
    view = isa.native.CacheView()
    _add_group(view, table, spec)
    view.add_layer(store.k, store.v, store.k_scale, store.v_scale, CODECS[store.codec.name], 0)
    view.set_slots(0, np.ascontiguousarray(table.slots))
    return view


def _add_group(view: isa.CacheView, table: Table, spec: LayerSpec) -> None:
    window = -1 if spec.window is None else spec.window
    tables = (table.blocks, table.first, table.n_blocks, table.kv_len, table.q_start)
    view.add_group(*tables, spec.n_heads, spec.n_kv_heads, window, spec.pinned)
