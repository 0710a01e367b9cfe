"""What a step costs beside the model: scheduling, bookkeeping, and the choice among the logits.

The real engine runs over a program that computes nothing.
"""

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.memory import CpuMemory
from kvarn.backends.host import HostLogits
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.engine.sampling import likeliest_token

STEPS = 16
LOGITS = 1 << 17
COLD = 48 << 20  # bytes that are read in a step, as a model does: then code and data of the engine leave the caches


class _Idle:
    """A program that applies its steps and computes nothing."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(vocab_size=16)
        self._logits = np.zeros((1, 16), np.float32)
        self._other = np.zeros(COLD, np.uint8)
        self.seconds = 0.0  # of reading, which is no cost of the engine

    def run(self, memory: CpuMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> HostLogits:
        memory.apply(step)
        start = time.perf_counter()
        self._other.max()
        self.seconds += time.perf_counter() - start
        return HostLogits(self._logits)


def step_seconds(backend: Cpu) -> float:
    planned = plan(CacheConfig([LayerSpec(1, 1, 16, 16)], 2 * STEPS + 2, "paged"), backend.default_layout)
    program = _Idle()
    computing: Any = program
    engine = Engine(computing, backend.memory(planned), KVCache(planned))
    request = engine.add([0], SamplingParams(max_tokens=2 * STEPS, ignore_eos=True))
    times: list[float] = []
    for _ in range(STEPS):
        before, start = program.seconds, time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start - (program.seconds - before))
    engine.cancel(request)
    return statistics.median(times)


def logit_seconds() -> float:
    logits = np.zeros(LOGITS, np.float32)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        likeliest_token(logits)
        times.append(time.perf_counter() - start)
    return min(times) / LOGITS
