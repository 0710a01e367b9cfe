"""Times of operations on the device, from events between them. They are read later, so no step waits for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvarn.backends.base import Counters, Span
from kvarn.backends.cuda.driver import Device, Event
from kvarn.backends.cuda.emit import Operation
from kvarn.backends.cuda.inbox import Frame
from kvarn.backends.cuda.memory import CudaMemory


class Timed(NamedTuple):
    """A step whose events were not read yet."""

    operations: Sequence[Operation]
    frame: Frame
    counters: Counters
    steps: int  # for how many steps it stands
    traced: bool
    begin: int


@dataclass(slots=True)
class Timeline:
    driver: Device
    events: list[Event] = field(default_factory=list)  # one more than operations
    pending: Timed | None = None
    spans: list[Span] = field(default_factory=list)

    def launch(
        self, operations: Sequence[Operation], memory: CudaMemory, frame: Frame, steps: int, traced: bool
    ) -> None:
        """Run the operations with an event after each."""
        while len(self.events) <= len(operations):
            self.events.append(self.driver.event())
        self.driver.synchronize()
        self.pending = Timed(operations, frame, memory.counters, steps, traced, time.monotonic_ns())
        self.driver.record(self.events[0])
        for operation, event in zip(operations, self.events[1:], strict=False):
            operation.run(memory, frame)
            self.driver.record(event)

    def read(self) -> None:
        """Take the times of the last timed step, if there is one."""
        if self.pending is None:
            return
        timed, self.pending = self.pending, None
        elapsed = [self.driver.elapsed(self.events[0], event) for event in self.events[: len(timed.operations) + 1]]
        launched = {None: 1, "prefill": timed.frame.n_runs, "decode": timed.frame.n_singles}
        spans = [
            (operation, start, end)
            for operation, (start, end) in zip(timed.operations, pairwise(elapsed), strict=True)
            if launched[operation.kernel]
        ]
        for operation, start, end in spans:
            if operation.kernel is not None:
                timed.counters.seconds[operation.kernel] += timed.steps * (end - start) / 1e3
        if timed.traced:
            facts = {"tokens": timed.frame.n_tokens, "rows": timed.frame.n_wanted}
            self.spans.append(Span("step", timed.begin, timed.begin + _ns(elapsed[-1]), facts))
            self.spans += [Span(op.name, timed.begin + _ns(start), timed.begin + _ns(end)) for op, start, end in spans]

    def take(self) -> list[Span]:
        """The spans since the last call: steps first, then operations."""
        spans, self.spans = self.spans, []
        return sorted(spans, key=lambda span: span.name != "step")


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
