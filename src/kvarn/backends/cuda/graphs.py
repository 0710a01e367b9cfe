"""Decode steps as graphs: one call of the driver instead of hundreds of launches.

A graph is captured at the first step of its bucket of rows and buckets of splits, and replayed for all
later ones. Rows that pad a bucket see nothing and write nothing that is read. A graph names memory by its
address, so all graphs are dropped when the workspace, the inbox or the array of sampled tokens moves, or
when another cache comes.
Moves of blocks and edits of tables are launched before it.
"""

import weakref
from collections.abc import Sequence

from kvarn.backends.cuda.buffers import Allocation, Workspace
from kvarn.backends.cuda.driver import Device, Graph
from kvarn.backends.cuda.emit import Operation
from kvarn.backends.cuda.inbox import Frame
from kvarn.backends.cuda.memory import CudaMemory

Key = tuple[int, ...]  # rows, then splits of each group


class Graphs:
    def __init__(self, driver: Device, operations: Sequence[Operation], workspace: Workspace) -> None:
        self.captured = self.replayed = 0
        self._driver, self._operations, self._workspace = driver, operations, workspace
        self._graphs: dict[Key, Graph] = {}
        self._bound: list[weakref.ref[Allocation] | None] = []  # the memory that the graphs name

    def run(self, memory: CudaMemory, frame: Frame, sampled: Allocation) -> None:
        """All operations of a step, from a graph if it can be one."""
        if not frame.bucket:
            self._launch(memory, frame)
            return
        named = (self._workspace.memory, sampled, *memory.movable)
        bound = [None if each is None else weakref.ref(each) for each in named]
        if bound != self._bound:
            self._graphs, self._bound = {}, bound
        key = (frame.bucket, *(group.bucket for group in frame.groups))
        if key not in self._graphs:
            self._graphs[key] = self._driver.capture(lambda: self._launch(memory, frame.padded()))
            self.captured += 1
        self._driver.replay(self._graphs[key])
        self.replayed += 1

    def _launch(self, memory: CudaMemory, frame: Frame) -> None:
        for operation in self._operations:
            operation.run(memory, frame)
