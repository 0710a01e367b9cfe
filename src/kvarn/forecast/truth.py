"""The truth beside a forecast: what a loaded model holds, and how fast it is.

Memory is what this process holds in physical memory, with the cells that were not written yet counted as if they
were. So it is what the process holds after enough requests, and can be known before.
Speed is that of the engine, with sampling and bookkeeping, as a user has it.
"""

import ctypes
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvarn.backends.cpu.memory import CpuMemory
from kvarn.bench.ids import RandomIds
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError
from kvarn.forecast.memory import resident_bytes
from kvarn.llm import LLM
from kvarn.loading.progress import Progress

TOKENS = 24  # that are decoded at each depth
WARM = 4  # of them, that are not timed
ENDLESS = SamplingParams(max_tokens=1 << 60, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """One sequence: a prompt of this many tokens, and then decoding up to `depth`."""

    depth: int
    prompt: int
    first_token_s: float
    decode_tok_s: float


def held_bytes(memory: object) -> int | None:
    """Physical memory of this process, as if every cell was written. None where the system does not say it."""
    resident = resident_bytes()
    if resident is None or not isinstance(memory, CpuMemory):
        return resident
    arena = memory.host.arena
    return resident + arena.nbytes - written_bytes(arena.ctypes.data, arena.nbytes)


def written_bytes(address: int, nbytes: int) -> int:
    """How much of this memory has physical pages; all of it, if the system does not say it."""
    page = os.sysconf("SC_PAGE_SIZE")
    before = address % page
    n_pages = -(-(before + nbytes) // page)
    resident = np.zeros(n_pages, np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return nbytes
    start, length = ctypes.c_void_p(address - before), ctypes.c_size_t(before + nbytes)
    if mincore(start, length, ctypes.c_void_p(resident.ctypes.data)):
        return nbytes
    return min(page * int(np.count_nonzero(resident & 1)), nbytes)


def measured_speed(llm: LLM, depths: Sequence[int], progress: Progress) -> list[Measured]:
    """The engine must be idle."""
    longest = max(depths, default=0) + TOKENS
    ids = RandomIds(llm.config.vocab_size, longest)
    found = []
    warm_up(llm.engine, 0 if llm.backend.name == "cpu" else max(depths, default=0), ids(len(depths), longest))
    for done, depth in enumerate(depths):
        progress(f"measuring at a depth of {depth:,}", done, len(depths))
        found.append(measured_at(llm.engine, depth, ids(done, longest)))
    progress("measuring", len(depths), len(depths))
    return found


def warm_up(engine: Engine, deepest: int, ids: Sequence[int]) -> None:
    """The first steps of a program take longer, and on a device also the first prompt: two steps of it suffice."""
    measured_at(engine, min(2 * engine.config.max_batch_tokens, deepest), ids)


def measured_at(engine: Engine, depth: int, ids: Sequence[int]) -> Measured:
    """Prompts of other depths begin with other tokens, so nothing is reused."""
    room = engine.cache.longest - TOKENS  # the context must not end the answer
    prompt = max(min(depth - (TOKENS + WARM) // 2, room), 1)
    start = time.perf_counter()
    request = engine.add(ids[:prompt], ENDLESS, salt=b"%d" % depth)
    try:
        while not engine.step():
            if not engine.busy:
                raise KvarnError("the model computes numbers that are not finite: its speed cannot be measured")
        first = time.perf_counter() - start
        times = []
        for _ in range(TOKENS - 1):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
    finally:
        engine.cancel(request)
    return Measured(depth, prompt, first, 1 / statistics.median(times[WARM:]))
