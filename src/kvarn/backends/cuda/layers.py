"""A cache on the device that is driven layer by layer with arrays of the host: for tests and `kvarn strategies`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Floats
from kvarn.backends.base import Counters, check_rows
from kvarn.backends.cuda.buffers import Allocation, Rows, View
from kvarn.backends.cuda.inbox import Frame
from kvarn.backends.cuda.memory import CudaMemory, query_width, written_bytes
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step
from kvarn.errors import BadStep, UnknownLayer

NO_NORMS = (0, 0, 0)
NO_ROPE = (0, 0, 0)


class CudaLayers:
    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._frame: Frame | None = None
        self._written: int | None = None  # the layer whose last rows are not in the tail yet

    @property
    def counters(self) -> Counters:
        return self._memory.counters

    def apply(self, step: Step) -> None:
        self._keep()
        self._frame = self._memory.apply(step)

    def write(self, layer: int, k: Floats, v: Floats) -> None:
        spec, frame = self._spec(layer), self._checked_frame()
        check_rows("k", k, (frame.n_tokens, spec.n_kv_heads, spec.k_dim))
        check_rows("v", v, (frame.n_tokens, spec.n_kv_heads, spec.v_dim))
        keys, values = self._upload(k), self._upload(v)
        views = (_view(keys, k), _view(keys, k), _view(values, v))  # there are no queries
        self._keep()
        self._memory.store(layer, frame, (0, spec.n_kv_heads), views, NO_NORMS, NO_ROPE, 0.0, 0)
        self._written = layer
        self._memory.driver.synchronize()
        group = self._memory.plan.groups[self._memory.group_of[layer]]
        self.counters.written += written_bytes(group, frame.step)

    def attend(self, layer: int, q: Floats, scale: float | None = None) -> Floats:
        spec, frame, memory = self._spec(layer), self._checked_frame(), self._memory
        check_rows("q", q, (frame.n_tokens, spec.n_heads, spec.k_dim))
        scale = spec.k_dim**-0.5 if scale is None else scale
        given, queries = self._upload(q), Allocation(memory.driver, 4 * q.shape[0] * query_width(*q.shape[1:]))
        memory.store(layer, frame, (spec.n_heads, 0), (_view(given, q),) * 3, NO_NORMS, NO_ROPE, 0.0, queries.address)
        out = np.zeros((*q.shape[:2], spec.v_dim), np.float32)
        results = self._upload(out)
        rows = _view(results, out).rows
        memory.prefill(layer, frame, queries.address, rows, scale)
        memory.decode(layer, frame, queries.address, rows, scale)
        memory.driver.download(results.address, out)
        self._count(layer, frame)
        return out

    def _keep(self) -> None:
        """Attention may be asked for several times, so the tail is brought up to date by what follows."""
        if self._written is not None and self._frame is not None:
            self._memory.driver.bind()
            self._memory.keep(self._written, self._frame)
            self._written = None

    def _count(self, layer: int, frame: Frame) -> None:
        memory, index = self._memory, self._memory.group_of[layer]
        group, changes = memory.plan.groups[index], frame.step.groups[index]
        for length, n in zip(changes.kv_len, frame.step.n_new, strict=True):
            self.counters.read += group.read_bytes(length - n, length)
        for name, n in (("prefill", frame.n_runs), ("decode", frame.n_singles)):
            if n:
                self.counters.calls[name] += 1

    def _spec(self, layer: int) -> LayerSpec:
        if not 0 <= layer < self._memory.plan.n_layers:
            raise UnknownLayer(f"layer {layer} of a model with layers 0 to {self._memory.plan.n_layers - 1}")
        return self._memory.plan.groups[self._memory.group_of[layer]].config.spec

    def _checked_frame(self) -> Frame:
        self._memory.driver.bind()
        if self._frame is None:
            raise BadStep("no step was applied: prepare one and apply it first")
        return self._frame

    def _upload(self, x: NDArray[Any]) -> Allocation:
        memory = Allocation(self._memory.driver, x.nbytes)
        self._memory.driver.upload(memory.address, x)
        return memory


def _view(memory: Allocation, x: Floats) -> View:
    width = x.shape[1] * x.shape[2]
    return View(Rows("f32", width, False, memory.address), 0, width)
