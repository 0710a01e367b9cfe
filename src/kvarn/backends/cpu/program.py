"""A model on the CPU backend: its calls recorded once, its weights packed once, a step as one native call."""

from sys import getrefcount
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvarn import isa
from kvarn.backends.cpu import view_of
from kvarn.backends.cpu.emit import Weights, emit
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.cache.spec import align
from kvarn.graph.fuse import fuse
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.quants import grid_of
from kvarn.models.architectures import graph_of
from kvarn.models.config import ModelConfig
from kvarn.progress import Progress, quiet

LANES = 16  # output rows that are computed side by side: logits come in whole groups


class CpuProgram:
    def __init__(self, config: ModelConfig, weights: Weights, graph: Graph, pool: isa.Pool) -> None:
        self.config = config
        self.weights = weights
        self._threads = pool.size
        self._program = isa.native.Program(pool)
        self._views: WeakKeyDictionary[KVCache, isa.CacheView] = WeakKeyDictionary()
        emit(fuse(graph), config.norm_eps, weights, self._program)
        self._memory = np.empty(0, np.float32)  # of the last step's logits
        self._hidden = graph.nodes[-1].inputs[0].width  # what logits are made of

    @property
    def nbytes(self) -> int:
        """Of the weights; a tied embedding is counted once."""
        matrices = sum(matrix.nbytes for matrix in self.weights.matrices.values())
        return matrices + sum(vector.nbytes for vector in self.weights.vectors.values())

    @property
    def workspace(self) -> int:
        return self._program.workspace

    def run(
        self, cache: KVCache, tokens: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> Floats:
        """Logits [len(rows), vocabulary] of these rows of the step that `cache` has prepared."""
        view = self._views.get(cache)
        if view is None:
            view = self._views[cache] = view_of(cache)
        for group, table in enumerate(cache.tables):
            view.set_slots(group, table.slots)
        vocabulary = self._program.vocabulary
        logits = self._logits_of(len(rows))
        counts = self._program.run(view, tokens, positions, np.asarray(rows, np.int64), logits)
        counters = cache.counters
        counters.written += counts[0]
        counters.read += counts[1]
        for name, calls, ns in zip(("prefill", "decode"), counts[2:4], counts[4:], strict=True):
            if calls:
                counters.calls[name] += calls
                counters.seconds[name] += ns / 1e9 / self._threads
        return logits[:, :vocabulary]

    def _logits_of(self, rows: int) -> Floats:
        """Memory for them: that of the step before, if nobody holds it any more."""
        width = align(self._program.vocabulary, LANES)
        if len(self._memory) < rows * width + LANES or getrefcount(self._memory) > 2:
            self._memory = np.empty(rows * width + LANES, np.float32)
        start = -self._memory.ctypes.data % 64 // 4  # whole cache lines
        return self._memory[start : start + rows * width].reshape(rows, width)

    def hidden_of(self, n_rows: int) -> Floats:
        """Hidden states [n_rows, hidden] of the last step: the final norm of the rows that it asked for."""
        hidden = np.empty((n_rows, self._hidden), np.float32)
        self._program.hidden(hidden)
        return hidden

    def reserve(self, tokens: int) -> None:
        """Workspaces for steps of so many tokens; a larger step grows them."""
        self._program.reserve(tokens)

    def trace(self, on: bool) -> None:
        self._program.trace(on)

    def timings(self) -> list[tuple[str, int, int]]:
        """(operation, begin, end) in ns since tracing began or this was last asked."""
        return self._program.timings()


def load_program(checkpoint: Checkpoint, pool: isa.Pool, progress: Progress = quiet) -> CpuProgram:
    """Record the model, pack its weights."""
    graph = graph_of(checkpoint.config, checkpoint.shapes)
    names = graph.weights
    matrices: dict[str, isa.Weight] = {}
    vectors: dict[str, Floats] = {}
    for done, name in enumerate(names):
        progress("loading", done, len(names))
        if len(checkpoint.shapes[name]) == 1:
            vectors[name] = np.ascontiguousarray(checkpoint.tensor(name))
        else:
            matrices[name] = pack(checkpoint, name, pool)
    progress("loading", len(names), len(names))
    return CpuProgram(checkpoint.config, Weights(matrices, vectors), graph, pool)


def pack(checkpoint: Checkpoint, name: str, pool: isa.Pool, most_rows: int | None = None) -> isa.Weight:
    """The packed form of a matrix, or of its first rows."""
    stored = checkpoint.encoded(name)
    rows = np.ascontiguousarray(stored.rows[:most_rows])
    return isa.native.pack(pool, stored.type, rows, stored.shape[-1], grid_of(stored.type))
