"""A model on the device: launches in order, and what a step takes to and from the host.

A step copies its integers to the device, launches, and returns. `Logits.sample` and `rows` wait. Decode
steps are replayed as graphs. Times come from events on the device: of all operations while tracing, and of
attention in one step of SAMPLED. Such a step is launched without a graph.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from kvarn.arrays import Floats
from kvarn.backends.base import Draw, Span
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.emit import emit
from kvarn.backends.cuda.graphs import Graphs
from kvarn.backends.cuda.inbox import Frame, in_bucket
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.backends.cuda.sampler import Sampler
from kvarn.backends.cuda.specs import TYPE_BYTES
from kvarn.backends.cuda.timeline import Timeline
from kvarn.backends.cuda.weights import Weights
from kvarn.cache.step import Step
from kvarn.errors import BadStep
from kvarn.graph.fuse import fuse
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress
from kvarn.models.config import ModelConfig

LOGIT_ROWS = 128  # rows of logits on the device, a multiple of 4; more are computed in parts
SAMPLED = 256  # one of this many steps is timed


class CudaProgram:
    def __init__(self, driver: Device, checkpoint: Checkpoint, graph: Graph, progress: Progress) -> None:
        self.config: ModelConfig = checkpoint.config
        self._driver = driver
        self._weights = Weights(driver, checkpoint, len(graph.weights), progress)
        try:
            self._emitted = emit(fuse(graph), self.config.norm_eps, self._weights, driver)
            self._weights.finish()
        finally:
            self._weights.close()
        self._vocabulary = self._emitted.logits.n_rows
        self._hidden = graph.nodes[-1].inputs[0].width
        self._logits = Allocation(driver, 4 * LOGIT_ROWS * self._vocabulary)
        self.graphs = Graphs(driver, self._emitted.operations, self._emitted.workspace)
        self._first = 0  # the wanted row at which the logits on the device begin
        self._sampler = Sampler(driver, self._vocabulary, LOGIT_ROWS)
        self._sampled: tuple[Frame, int] | None = None  # the last step, and how many tokens the next one can name
        self._timeline = Timeline(driver)
        self._untimed = 0  # steps since the last timed one
        self._tracing = False
        self._n_steps = 0

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    @property
    def workspace(self) -> int:
        memory = self._emitted.workspace.memory
        held = self._logits.nbytes + self._emitted.products.nbytes + self._sampler.nbytes
        return held + (0 if memory is None else memory.nbytes)

    def reserve(self, tokens: int) -> None:
        """Allocate the workspace for steps of this many tokens; a larger step allocates it again."""
        self._emitted.workspace.reserve(in_bucket(tokens))

    def run(self, memory: CudaMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> "CudaLogits":
        frame = self._compute(memory, step, tokens, wanted)
        self._launch_logits(frame, 0)
        return CudaLogits(self, frame)

    def hidden(self, memory: CudaMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
        frame = self._compute(memory, step, tokens, wanted)
        states = np.empty((frame.n_wanted, self._hidden), np.float32)
        if not frame.n_wanted:
            return states
        room = Allocation(self._driver, states.nbytes)
        try:
            self._emitted.hidden.launch(self._driver, frame.n_wanted, room.address)
            self._driver.download(room.address, states)
        finally:
            room.release()
        return states

    def _compute(self, memory: CudaMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Frame:
        """Launch everything up to the input of the logits."""
        self._check(step, tokens, wanted)
        self._sampled = None
        self._driver.bind()
        self.reserve(len(step.positions))
        timed = self._tracing or self._n_steps % SAMPLED == 0
        self._n_steps += 1
        if timed:
            self._timeline.read()
        frame = memory.apply(step, tokens, wanted)
        frame.sampled = self._sampler.tokens.address
        memory.count(frame)
        if timed:
            steps, self._untimed = 1 + self._untimed, 0
            self._timeline.launch(self._emitted.operations, memory, frame, steps, self._tracing)
        else:
            self._untimed += 1
            self.graphs.run(memory, frame, self._sampler.tokens)
        return frame

    def _check(self, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> None:
        """A wrong number would read outside of an array on the device."""
        if len(tokens) != len(step.positions):
            raise BadStep(f"the step has {len(step.positions)} positions, and {len(tokens)} tokens were given")
        named = 0 if self._sampled is None else self._sampled[1]
        if len(tokens) and not -named <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise BadStep(f"a token is outside of the vocabulary, 0 to {self.config.vocab_size - 1}, or not sampled")
        if len(wanted) and not 0 <= min(wanted) <= max(wanted) < len(tokens):
            raise BadStep(f"a wanted row is outside of the step, 0 to {len(tokens) - 1}")
        if len(wanted) > len(tokens):
            raise BadStep(f"{len(wanted)} rows of a step of {len(tokens)} tokens are wanted: a row is named twice")

    # -- logits ----------------------------------------------------------------------------------------------------

    def _launch_logits(self, frame: Frame, start: int) -> None:
        """Compute the logits of LOGIT_ROWS wanted rows, or of those that are left."""
        last, matrix = self._emitted.last, self._emitted.logits
        n_rows = min(frame.n_wanted - start, LOGIT_ROWS)
        if n_rows > 0:
            x = last.address + start * last.stride * TYPE_BYTES[last.form]
            self._emitted.products.launch(x, matrix, self._logits.address, self._vocabulary, n_rows)
        self._first = start

    def _hold_logits(self, frame: Frame, start: int) -> None:
        """Compute these logits, unless they are on the device. `run` has launched the first ones."""
        if self._first != start:
            self._launch_logits(frame, start)

    def sample(self, frame: Frame, draws: Sequence[Draw], n_tokens: int) -> Callable[[], list[int]]:
        """The draws are in ascending order of rows."""
        self._driver.bind()
        rounds = [
            (start, part[at : at + LOGIT_ROWS])
            for start, group in groupby(draws, lambda draw: draw.row // LOGIT_ROWS * LOGIT_ROWS)
            for part in [list(group)]
            for at in range(0, len(part), LOGIT_ROWS)
        ]
        self._sampler.begin(len(rounds))
        for turn, (start, part) in enumerate(rounds):
            self._hold_logits(frame, start)
            self._sampler.launch(turn, self._logits.address, start, part, n_tokens)
        whole = all(len(part) == LOGIT_ROWS for _, part in rounds[:-1])
        self._sampled = (frame, len(draws)) if whole else None
        return self._sampler.receive([len(part) for _, part in rounds])

    def sampled_last(self, frame: Frame) -> bool:
        return self._sampled is not None and self._sampled[0] is frame

    def fetch_logits(self, frame: Frame, wanted: Sequence[int]) -> Floats:
        """The logits of these wanted rows, in ascending order."""
        self._driver.bind()
        found = np.empty((len(wanted), self._vocabulary), np.float32)
        row_bytes, at = 4 * self._vocabulary, 0
        while at < len(wanted):
            start = wanted[at] // LOGIT_ROWS * LOGIT_ROWS
            n = 1  # rows that follow each other
            while at + n < len(wanted) and wanted[at + n] == wanted[at] + n < start + LOGIT_ROWS:
                n += 1
            self._hold_logits(frame, start)
            self._driver.download(self._logits.address + (wanted[at] - start) * row_bytes, found[at : at + n])
            at += n
        return found

    # -- times -----------------------------------------------------------------------------------------------------

    def trace(self, on: bool) -> None:
        self._tracing = on

    def timings(self) -> list[Span]:
        self._driver.bind()
        self._timeline.read()
        return self._timeline.take()


class CudaLogits:
    """Logits that stay on the device until they are asked for."""

    samples = True

    def __init__(self, program: CudaProgram, frame: Frame) -> None:
        self._program, self._frame = program, frame

    def sample(self, draws: Sequence[Draw], n_tokens: int) -> Callable[[], list[int]]:
        return self._program.sample(self._frame, draws, n_tokens)

    @property
    def latest(self) -> bool:
        return self._program.sampled_last(self._frame)

    def rows(self, wanted: Sequence[int] | None = None) -> Floats:
        return self._program.fetch_logits(self._frame, range(self._frame.n_wanted) if wanted is None else wanted)
