"""Times of operations on the device, from events between them. They are read later, so no step waits for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarn.backends.base import Counters, Span
from kvarn.backends.cuda.driver import Device, Event
from kvarn.backends.cuda.emit import Operation
from kvarn.backends.cuda.inbox import Frame
from kvarn.backends.cuda.memory import CudaMemory


@dataclass(slots=True)
class Timeline:
    driver: Device
    events: list[Event] = field(default_factory=list)  # one more than operations
    pending: tuple[Frame, Sequence[Operation], int] | None = None  # the last timed step, and when it began
    spans: list[Span] = field(default_factory=list)

    def launch(self, operations: Sequence[Operation], memory: CudaMemory, frame: Frame) -> None:
        """Run the operations with an event after each."""
        while len(self.events) <= len(operations):
            self.events.append(self.driver.event())
        self.driver.synchronize()
        begin = time.monotonic_ns()
        self.driver.record(self.events[0])
        for operation, event in zip(operations, self.events[1:], strict=False):
            operation.run(memory, frame)
            self.driver.record(event)
        self.pending = frame, operations, begin

    def read(self, counters: Counters, weight: int, keep: bool) -> None:
        """Take the times of the last timed step. The time of attention counts `weight` times."""
        if self.pending is None:
            return
        frame, operations, begin = self.pending
        self.pending = None
        elapsed = [self.driver.elapsed(self.events[0], event) for event in self.events[: len(operations) + 1]]
        launched = {"prefill": frame.n_runs, "decode": frame.n_singles}
        for operation, start, end in zip(operations, elapsed, elapsed[1:], strict=False):
            if operation.kernel is not None and launched[operation.kernel]:
                counters.seconds[operation.kernel] += weight * (end - start) / 1e3
        if keep:
            facts = {"tokens": frame.n_tokens, "rows": frame.n_wanted}
            self.spans.append(Span("step", begin, begin + int(elapsed[-1] * 1e6), facts))
            self.spans += [
                Span(operation.name, begin + int(start * 1e6), begin + int(end * 1e6))
                for operation, start, end in zip(operations, elapsed, elapsed[1:], strict=False)
                if operation.kernel is None or launched[operation.kernel]
            ]

    def take(self) -> list[Span]:
        """The spans since the last call: steps first, then operations."""
        spans, self.spans = self.spans, []
        return sorted(spans, key=lambda span: span.name != "step")
