"""What is compared: caches of one model, each with memory of its own, over one set of weights.

A candidate is a combination of strategy, number type and window. The base is a contiguous cache of f32
cells without a window. The control has f16 cells and no window (verdict.py says what it is for).
Candidates with equal cells and equal visibility must give equal bits, whatever their strategy is; these
are twins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from kvarn.backends import place_of
from kvarn.backends.base import Backend, Memory
from kvarn.bench.subject import Setup, plan_of
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import Plan
from kvarn.cache.strategy import STRATEGIES
from kvarn.comparison.divergence import Track
from kvarn.errors import OutOfMemory
from kvarn.llm import LLM
from kvarn.words import counted

BASE = Setup("contiguous", "f32")
CONTROL = Setup("contiguous", "f16")
Kind = tuple[object, ...]


def setups(
    caches: Sequence[str], types: Sequence[str], windows: Sequence[int], pinned: int | None, chunk: int
) -> list[Setup]:
    """The base, the control if it is not among the others, and all combinations in the order given. Windows are for
    the strategies that have one."""
    wanted = []
    for cache, cache_type in product(caches, types):
        windowed = cache in STRATEGIES and STRATEGIES[cache].windowed
        pins = pinned if cache == "sinks" else None
        for window in windows if windowed and windows else (None,):
            wanted.append(Setup(cache, cache_type, window=window, pinned=pins, chunk=chunk))
    controlled = any((each.cache_type, each.window) == (CONTROL.cache_type, None) for each in wanted)
    first = [BASE] if controlled else [BASE, CONTROL]
    return list(dict.fromkeys([*(replace(each, chunk=chunk) for each in first), *wanted]))


def control_of(candidates: Sequence["Candidate"]) -> "Candidate":
    return next(each for each in candidates if (each.setup.cache_type, each.setup.window) == (CONTROL.cache_type, None))


def name_of(setup: Setup) -> str:
    window = "" if setup.window is None else f" window {setup.window:,}"
    return f"{setup.cache} {setup.cache_type}{window}"


@dataclass(slots=True)
class Candidate:
    setup: Setup
    plan: Plan
    memory: Memory
    cache: KVCache
    track: Track = field(default_factory=Track)
    twin: "Candidate | None" = None  # the first candidate of the same kind
    equal_to_twin: int = 0  # positions

    @property
    def name(self) -> str:
        return name_of(self.setup)


def kind_of(plan: Plan) -> Kind:
    """What decides the bits of an answer: the cells, and what each layer sees within the context."""
    seen = []
    for group in plan.groups:
        spec = group.config.spec
        cut = spec.window is not None and spec.window < plan.context
        seen.append((group.layers, (spec.window, spec.pinned) if cut else None))
    return (plan.codec.name, *sorted(seen, key=str))


def allocate(llm: LLM, wanted: Sequence[Setup], context: int) -> list[Candidate]:
    """The first one is the base. All caches are in memory at the same time."""
    plans = [plan_of(llm, setup, context, 1) for setup in wanted]
    _check_room(plans, llm.backend)
    candidates = [
        Candidate(setup, plan, llm.backend.memory(plan), KVCache(plan))
        for setup, plan in zip(wanted, plans, strict=True)
    ]
    first: dict[Kind, Candidate] = {}
    for each in candidates:
        twin = first.setdefault(kind_of(each.plan), each)
        each.twin = None if twin is each else twin
    return candidates


def _check_room(plans: Sequence[Plan], backend: Backend) -> None:
    wanted, room = sum(plan.nbytes for plan in plans), backend.memory_bytes
    if room is not None and wanted > room:
        raise OutOfMemory(
            f"{counted(len(plans), 'cache')} would take {wanted / 2**30:.1f} GiB together and {place_of(backend)} has "
            f"{room / 2**30:.1f} GiB of memory: lower the window of text (-c), or compare fewer of them"
        )
