"""A model on the CPU backend. It is recorded once, its weights are packed once, and a step is one native call."""

import time
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from kvarn import native
from kvarn.arrays import Floats
from kvarn.backends.base import Span
from kvarn.backends.cpu.emit import Weights, emit
from kvarn.backends.cpu.memory import CpuMemory
from kvarn.backends.host import HostLogits
from kvarn.cache.spec import align
from kvarn.cache.step import Step
from kvarn.graph.fuse import fuse
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.encodings import TensorInfo
from kvarn.loading.progress import Progress, quiet
from kvarn.loading.quants import grid_of
from kvarn.models.config import ModelConfig

LINE = 16  # floats of a cache line


class CpuProgram:
    def __init__(self, config: ModelConfig, weights: Weights, graph: Graph, pool: native.Pool) -> None:
        self.config = config
        self.weights = weights
        self._threads = pool.size
        self._program = native.Program(pool)
        emit(fuse(graph), config.norm_eps, weights, self._program)
        self._hidden = graph.nodes[-1].inputs[0].width  # width of the rows that logits are computed from
        self._logits = np.empty(0, np.float32)  # of the last step
        self._tracing = False
        self._steps: list[Span] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; a tied embedding is counted once."""
        matrices = sum(matrix.nbytes for matrix in self.weights.matrices.values())
        return matrices + sum(vector.nbytes for vector in self.weights.vectors.values())

    @property
    def workspace(self) -> int:
        return self._program.workspace + self._logits.nbytes

    def workspace_for(self, tokens: int, sequences: int, keys: int, block: int = 1, tails: int = 0) -> int:
        """Bytes between steps of this many tokens, with so many sequences that decode and see at most `keys` keys, and
        the logits of all of them. Rows of values are padded to multiples of `block` (Codec.block). `tails`: how many
        of K and V have one."""
        logits = 4 * (sequences * align(self._program.vocabulary, native.GROUP_ROWS) + LINE)
        return self._program.workspace_for(tokens, sequences, keys, block, tails) + logits

    def run(self, memory: CpuMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> HostLogits:
        memory.apply(step)
        logits = self._room_for(len(wanted))
        ids, rows = np.array(tokens, np.int64), np.array(wanted, np.int64)
        begin = time.monotonic_ns()
        counts = self._program.run(memory.view, ids, memory.host.positions, rows, logits)
        if self._tracing:
            facts = {"tokens": len(ids), "rows": len(rows)}
            self._steps.append(Span("step", begin, time.monotonic_ns(), facts))
        counters = memory.counters
        counters.written += counts[0]
        counters.read += counts[1]
        for name, calls, ns in zip(("prefill", "decode"), counts[2:4], counts[4:], strict=True):
            if calls:
                counters.calls[name] += calls
                counters.seconds[name] += ns / 1e9 / self._threads
        return HostLogits(logits[:, : self._program.vocabulary])

    def _room_for(self, rows: int) -> Floats:
        """Memory for logits; the next step overwrites it."""
        width = align(self._program.vocabulary, native.GROUP_ROWS)
        if len(self._logits) < rows * width + LINE:
            self._logits = np.empty(rows * width + LINE, np.float32)
        start = -self._logits.ctypes.data // 4 % LINE  # rows begin at a cache line
        return self._logits[start : start + rows * width].reshape(rows, width)

    def hidden(self, memory: CpuMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
        self.run(memory, step, tokens, wanted)
        states = np.empty((len(wanted), self._hidden), np.float32)
        self._program.hidden(states)
        return states

    def reserve(self, tokens: int) -> None:
        """Allocate workspaces for steps of this many tokens; a larger step grows them."""
        self._program.reserve(tokens)

    def trace(self, on: bool) -> None:
        self._tracing = on
        self._program.trace(on)

    def timings(self) -> list[Span]:
        steps, self._steps = self._steps, []
        return steps + [Span(*each) for each in self._program.timings()]


def load_program(checkpoint: Checkpoint, graph: Graph, pool: native.Pool, progress: Progress = quiet) -> CpuProgram:
    """Pack the weights that the graph needs, and emit the program."""
    names = graph.weights
    matrices: dict[str, native.PackedMatrix] = {}
    vectors: dict[str, Floats] = {}
    for done, name in enumerate(names):
        progress("loading", done, len(names))
        if len(checkpoint.shapes[name]) == 1:
            vectors[name] = np.ascontiguousarray(checkpoint.tensor(name))
        else:
            matrices[name] = pack(checkpoint, name, pool)
    progress("loading", len(names), len(names))
    return CpuProgram(checkpoint.config, Weights(matrices, vectors), graph, pool)


def pack(checkpoint: Checkpoint, name: str, pool: native.Pool) -> native.PackedMatrix:
    """The packed form of a matrix."""
    if (stretch := checkpoint.in_file(name)) is not None:
        file, info, n_rows = stretch
        with file.reading():
            return native.pack_file(
                pool, info.type, file.fileno(), info.offset, n_rows, info.shape[-1], grid_of(info.type)
            )
    stored = checkpoint.encoded(name)
    rows = np.ascontiguousarray(stored.rows)
    return native.pack(pool, stored.type, rows, stored.shape[-1], grid_of(stored.type))


def outline_program(checkpoint: Checkpoint, graph: Graph, pool: native.Pool) -> CpuProgram:
    """The program as `load_program` would make it, with weights that have sizes and no numbers. It cannot run."""
    types = {info.name: info.type for info in checkpoint.infos}
    matrices: dict[str, native.PackedMatrix] = {}
    vectors: dict[str, Floats] = {}
    for name in graph.weights:
        *rows, columns = checkpoint.shapes[name]
        if rows:
            matrices[name] = native.outline(types[name], prod(rows), columns)
        else:
            vectors[name] = np.zeros(columns, np.float32)
    return CpuProgram(checkpoint.config, Weights(matrices, vectors), graph, pool)


class PackedSize(NamedTuple):
    kind: str
    nbytes: int


def packed_size(info: TensorInfo) -> PackedSize:
    """Kind and bytes of a tensor in memory."""
    *rows, columns = info.shape
    if not rows:
        return PackedSize("F32", 4 * columns)
    weight = native.outline(info.type, prod(rows), columns)
    return PackedSize(weight.kind, weight.nbytes)
