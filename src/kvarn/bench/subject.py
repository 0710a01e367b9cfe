"""kvarn as the subject of a benchmark: the real engine, with sampling and bookkeeping.

Every sequence of a batch has different tokens, so no blocks are shared. The cache is filled once: each
repetition rewinds to the case's depth, and a deeper case continues from there. A ring that has wrapped
cannot rewind; then the tokens are computed again, outside the measured time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvarn.backends import check_memory
from kvarn.backends.base import Program
from kvarn.backends.loaded import check_keys
from kvarn.bench.case import GENERATE, Case, Reading
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Sample
from kvarn.errors import KvarnError
from kvarn.llm import LLM

Ids = Callable[[int, int], list[int]]  # (sequence, n) -> its first n token ids
ENDLESS = SamplingParams(max_tokens=1 << 60, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """The cache to measure, with the values of the command line's cache options."""

    cache: str = "auto"
    cache_type: str = "bf16"
    cache_layout: str | None = None
    block_size: int | None = None
    window: int | None = None
    pinned: int | None = None
    chunk: int = 512  # most tokens per step


def plan_of(llm: LLM, setup: Setup, context: int, batch: int) -> Plan:
    check_keys(llm.graph, setup.cache_type)
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
        ahead=llm.backend.ahead,
    )
    return plan(config, llm.backend.default_layout)


def build(llm: LLM, setup: Setup, context: int, batch: int, program: Program | None = None) -> Engine:
    """An engine with its own cache. It shares the loaded weights of `llm`."""
    if context > llm.config.context:
        raise KvarnError(
            f"this depth needs a context of {context} tokens and the model was trained for "
            f"{llm.config.context}: lower -d, -p or -n"
        )
    planned = plan_of(llm, setup, context, batch)
    check_memory(planned, llm.backend)
    memory = llm.backend.memory(planned)
    return Engine(program or llm.program, memory, KVCache(planned), EngineConfig(setup.chunk))


class EngineSubject:
    """`engine` must be idle and have room for `batch` sequences of the longest case."""

    def __init__(self, engine: Engine, batch: int, ids: Ids, weight_bytes: int) -> None:
        self.engine = engine
        self.ids = ids
        self.weight_bytes = weight_bytes
        self.samples: list[Sample] = []
        self.depth = 0  # the first `depth` tokens of each sequence are from `ids`; later ones were generated
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

    def generated(self, case: Case) -> list[int]:
        """What the last repetition of this case generated after the first sequence."""
        return self.samples[0].tokens[case.depth + 1 :]

    def close(self) -> None:
        for sample in self.samples:
            self.engine.cancel(sample.request)

    def _go_to(self, depth: int) -> None:
        for i, sample in enumerate(self.samples):
            self.engine.restart(sample, self.ids(i, depth), min(depth, self.depth))
        self._catch_up()
        self.depth = depth

    def _catch_up(self) -> int:
        """Compute all known tokens and return their number. Predicted tokens are dropped, so a sequence that is
        finished does not take part in further steps."""
        missing = sum(sample.missing for sample in self.samples)
        while any(sample.missing for sample in self.samples):
            for event in self.engine.step():
                event.sample.tokens.pop()
        return missing

    def _generate(self, n: int) -> int:
        return sum(len(self.engine.step()) for _ in range(n))
