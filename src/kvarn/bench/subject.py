"""kvarn itself as the subject of a benchmark: the real engine, sampling and bookkeeping included.

The sequences of a batch have tokens of their own, so no block is shared and every cell is read from its own place. A
cache fills once: each repetition rewinds to the case's depth, and a deeper case goes on from there. What a rewind
cannot give back (a ring that has gone round) is computed again, outside the measured time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvarn.backends.base import Program
from kvarn.bench.case import GENERATE, Case, Reading
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.request import Sample, SamplingParams
from kvarn.errors import KvarnError
from kvarn.llm import LLM

Ids = Callable[[int, int], list[int]]  # (sequence, n) -> its first n token ids
ENDLESS = SamplingParams(max_tokens=1 << 60, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """A cache to measure, as `--cache` and its companions name it."""

    cache: str = "auto"
    cache_type: str = "bf16"
    cache_layout: str | None = None
    block_size: int | None = None
    window: int | None = None
    pinned: int | None = None
    chunk: int = 512  # most tokens per step


def build(llm: LLM, setup: Setup, context: int, batch: int, program: Program | None = None) -> Engine:
    """An engine with a cache of its own over the model's weights, which are loaded once."""
    if context > llm.config.context:
        raise KvarnError(
            f"this depth needs a context of {context} tokens and {llm.config.name} was trained for "
            f"{llm.config.context}: lower -d, -p or -n"
        )
    config = CacheConfig(
        layers=llm.config.layer_specs,
        context=context,
        strategy=setup.cache,
        codec=setup.cache_type,
        layout=setup.cache_layout,
        block_size=setup.block_size,
        max_seqs=batch,
        max_chunk=min(setup.chunk, context),
        window=setup.window,
        pinned=setup.pinned,
    )
    planned = plan(config, llm.backend.default_layout)
    memory = llm.backend.memory(planned)
    return Engine(program or llm.program, memory, KVCache(planned), EngineConfig(setup.chunk))


class EngineSubject:
    """`engine` must be idle, and hold `batch` sequences of the longest case's context."""

    def __init__(self, engine: Engine, batch: int, ids: Ids, weight_bytes: int) -> None:
        self.engine = engine
        self.ids = ids
        self.weight_bytes = weight_bytes
        self.samples: list[Sample] = []
        self.depth = 0  # so many tokens of each sequence are `ids`; what follows was generated
        for i in range(batch):
            request = engine.add(ids(i, 1), ENDLESS, salt=b"%d" % i)
            self.samples += request.samples
        self._catch_up()

    def prepare(self, case: Case) -> None:
        assert len(self.samples) == case.batch
        warm = Case(case.kind, min(case.n, 8), case.depth, case.batch)
        self.measure(warm)
        self._go_to(case.depth)

    def measure(self, case: Case) -> Reading:
        self._go_to(case.depth)
        extra = 1 if case.kind == GENERATE else case.n
        for i, sample in enumerate(self.samples):
            self.engine.restart(sample, self.ids(i, case.depth + extra), sample.computed)
        counters, stats = self.engine.memory.counters, self.engine.stats
        read, steps = counters.read, stats.steps
        start = time.perf_counter()
        tokens = self._generate(case.n) if case.kind == GENERATE else self._catch_up()
        seconds = time.perf_counter() - start
        steps = stats.steps - steps
        return Reading(tokens, seconds, counters.read - read + steps * self.weight_bytes, steps)

    def describe(self) -> dict[str, object]:
        plan = self.engine.cache.plan
        return {"strategy": plan.strategy.name, "layout": plan.layout.name, "cache_bytes": plan.nbytes}

    @property
    def depths(self) -> list[int]:
        """Tokens in the cache, by sequence."""
        return [self.engine.cache.length(sample.id) for sample in self.samples]

    def close(self) -> None:
        for sample in self.samples:
            self.engine.cancel(sample.request)

    def _go_to(self, depth: int) -> None:
        for i, sample in enumerate(self.samples):
            self.engine.restart(sample, self.ids(i, depth), min(depth, self.depth))
        self._catch_up()
        self.depth = depth

    def _catch_up(self) -> int:
        """Compute what is known, and say how much that was. What it predicts is dropped: who is done sits out."""
        missing = sum(sample.missing for sample in self.samples)
        while any(sample.missing for sample in self.samples):
            for event in self.engine.step():
                event.sample.tokens.pop()
        return missing

    def _generate(self, n: int) -> int:
        return sum(len(self.engine.step()) for _ in range(n))
