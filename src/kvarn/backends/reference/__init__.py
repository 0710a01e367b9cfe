"""The reference backend: simple NumPy code, slow, and the oracle for every other backend."""

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Floats
from kvarn.backends.host import HostMemory, Store, Table
from kvarn.backends.host_memory import memory_bytes
from kvarn.backends.pool import make_pool
from kvarn.backends.reference import attention, cells
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import ALIGNMENT, Plan
from kvarn.cache.spec import LayerSpec
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress, quiet
from kvarn.native import Pool


class ReferenceKernels:
    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        cells.write(k, v, store, table)

    def prefill(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        attention.prefill(q, store, table, spec, scale, out)

    def decode(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        attention.decode(q, store, table, spec, scale, out)


class Reference:
    name = "reference"
    default_layout = "token-major"
    ahead = 0

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool or Pool(1)
        self.kernels = ReferenceKernels()

    @property
    def memory_bytes(self) -> int | None:
        return memory_bytes()

    def room(self) -> None:
        return None

    def memory(self, plan: Plan) -> HostMemory:
        return HostMemory(plan, self.kernels, allocate)

    layers = memory

    def load(self, checkpoint: Checkpoint, graph: Graph, max_tokens: int, progress: Progress) -> ReferenceProgram:
        return ReferenceProgram(checkpoint.config, load_weights(checkpoint, graph, progress), self._pool)

    def facts(self) -> dict[str, str]:
        return {"name": self.name}


def open_backend(threads: int | None, progress: Progress) -> Reference:
    return Reference(make_pool(threads))


def allocate(nbytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)  # the system backs a page when it is first written
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def load_weights(checkpoint: Checkpoint, graph: Graph, progress: Progress = quiet) -> dict[str, Floats]:
    names = graph.weights
    weights = {}
    for done, name in enumerate(names):
        progress("loading", done, len(names))
        weights[name] = checkpoint.tensor(name)
    progress("loading", len(names), len(names))
    return weights
