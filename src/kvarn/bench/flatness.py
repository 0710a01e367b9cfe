"""Measures how the time of a decoded token grows with the context.

A line is fitted to the time per token, as a function of the bytes that a token reads (weights and cells).
Its slope is the time per byte. Its intercept is the time per token that does not depend on the bytes.
Two more results: Python's share of a step (everything outside the one native call), and the time of
attention per layer and head (the time of a step minus that of a step at depth 0).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.bench.case import Case
from kvarn.bench.ids import RandomIds
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.llm import LLM


class Timed:
    """A program that adds up the time of its calls."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def run(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._program.run(*args)
        finally:
            self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def measure(llm: LLM, setup: Setup, depths: Sequence[int], n: int, repetitions: int) -> list[dict[str, float]]:
    program = Timed(llm.program)
    context = Case("tg", n, max(depths)).context
    engine = build(llm, setup, context, 1, program)
    ours = EngineSubject(engine, 1, RandomIds(llm.config.vocab_size, context), llm.program.nbytes)
    points = []
    for depth in depths:
        case = Case("tg", n, depth)
        ours.prepare(case)
        times, shares, nbytes = [], [], 0.0
        for _ in range(repetitions):
            before = program.seconds
            reading = ours.measure(case)
            times.append(reading.seconds / reading.tokens)
            shares.append(1 - (program.seconds - before) / reading.seconds)
            nbytes = reading.nbytes / reading.tokens
        middle = statistics.median(times)
        spread = (max(times) - min(times)) / middle
        points.append(
            {
                "depth": depth,
                "ms_per_token": 1000 * middle,
                "spread": spread,
                "bytes_per_token": nbytes,
                "python_share": statistics.median(shares),
            }
        )
    return points


def fit(
    points: Sequence[dict[str, float]], bandwidth: Callable[[int], float], layers: int, heads: int
) -> dict[str, float]:
    """The line through the points. `bandwidth` says how many GB/s a read of so many bytes gets."""
    nbytes = np.array([point["bytes_per_token"] for point in points])
    ms = np.array([point["ms_per_token"] for point in points])
    slope, intercept = np.polyfit(nbytes, ms, 1)
    residual = ms - (slope * nbytes + intercept)
    grown_ms, grown_bytes = ms[-1] - ms[0], nbytes[-1] - nbytes[0]
    must = grown_bytes / bandwidth(int(nbytes[-1])) / 1e6  # ms
    return {
        "slope_ns_per_byte": slope * 1e6,
        "slope_gb_s": 1 / (slope * 1e6),
        "intercept_ms": intercept,
        "r_squared": 1 - float(residual @ residual) / float((ms - ms.mean()) @ (ms - ms.mean())),
        "growth_ms": grown_ms,
        "growth_at_read_bandwidth_ms": must,
        "growth_over_bandwidth": grown_ms / must,
        "attention_us_per_layer_and_head_at_deepest": 1000 * grown_ms / (layers * heads),
        "python_share": statistics.median(point["python_share"] for point in points),
    }
