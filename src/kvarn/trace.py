"""A trace of steps and kernels for Perfetto or chrome://tracing, from the native program's own timers.

`Traced` stands in front of a program while it runs; without it nothing is timed. Times are those of the monotonic
clock, which the native timers read too.
"""

import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.cpu.program import CpuProgram
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.errors import KvarnError


class Traced:
    def __init__(self, program: object) -> None:
        if not isinstance(program, CpuProgram):
            raise KvarnError("a trace comes from the native program's timers: use the cpu backend")
        self.config = program.config
        self._program = program
        self._steps: list[tuple[int, int, int, int]] = []  # begin, end, tokens, rows of logits
        program.trace(True)

    @property
    def nbytes(self) -> int:
        return self._program.nbytes

    @property
    def workspace(self) -> int:
        return self._program.workspace

    def run(
        self, cache: KVCache, tokens: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> Floats:
        begin = time.monotonic_ns()
        logits = self._program.run(cache, tokens, positions, rows)
        self._steps.append((begin, time.monotonic_ns(), len(tokens), len(rows)))
        return logits

    def events(self) -> list[dict[str, object]]:
        """In the trace-event format; times are microseconds from the first step."""
        kernels = self._program.timings()
        zero = min((step[0] for step in self._steps), default=0)

        def event(name: str, thread: int, begin: int, end: int, **facts: int) -> dict[str, object]:
            spans = {"ts": (begin - zero) / 1000, "dur": (end - begin) / 1000}
            return {"name": name, "ph": "X", "pid": 1, "tid": thread, **spans, "args": facts}

        steps = [event("step", 1, begin, end, tokens=n, rows=rows) for begin, end, n, rows in self._steps]
        return steps + [event(name, 2, begin, end) for name, begin, end in kernels]

    def save(self, path: str) -> None:
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
            for thread, name in ((1, "steps"), (2, "operations"))
        ]
        try:
            Path(path).write_text(json.dumps({"traceEvents": names + self.events()}), encoding="utf-8")
        except OSError as error:
            raise KvarnError(f"{path}: {error.strerror}") from None
