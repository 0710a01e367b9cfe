"""What a model needs on a device with memory of its own, and how fast it will be there.

Weights are what `backends/cuda/limits.py` counts. The cache takes what is left, as `cache/room.py` decides. Context,
workspace and margin are one number there, and here. Speed comes from trials on the device (miniature.py), which are
kept as those of the host are (machine.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarn.backends.base import Backend
from kvarn.backends.choice import BESIDE
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.cache.room import plan_into
from kvarn.errors import OutOfMemory
from kvarn.forecast import machine, miniature
from kvarn.forecast.miniature import Seconds
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress

LAYOUT, AHEAD = "head-major", 1  # of the cuda backend


@dataclass(frozen=True, slots=True)
class OnDevice:
    name: str
    weights: int
    beside: int  # the driver's context, the workspace, a margin
    plan: Plan  # of the cache: the largest, if it fits
    budget: int  # free bytes
    fits: bool

    @property
    def total(self) -> int:
        return self.weights + self.beside + self.plan.nbytes


def on_device(name: str, free: int, checkpoint: Checkpoint, config: CacheConfig) -> OnDevice:
    """`free`: bytes of the device."""
    config = replace(config, ahead=AHEAD)
    weights, needed = weight_bytes(checkpoint), plan(config, LAYOUT)
    room = free - weights - BESIDE
    fits = needed.nbytes <= room
    if config.cache_bytes is None and room > 0:  # then it takes what is left
        try:
            needed, fits = plan_into(room, config, LAYOUT), True
        except OutOfMemory:
            fits = False
    return OnDevice(name, weights, BESIDE, needed, free, fits)


def speed_on_device(
    backend: Backend,
    checkpoint: Checkpoint,
    config: CacheConfig,
    max_tokens: int,
    depths: Sequence[int],
    *,
    fresh: bool,
    progress: Progress,
) -> dict[int, Seconds]:
    """By depth, for one sequence; measured as far as it is not known. `fresh`: measure all of it again."""
    name, named = _machine(backend), _named(checkpoint, config, max_tokens, depths)
    kept = {} if fresh else machine.read(name, time.time())
    missing = [depth for depth in depths if not set(named[depth]) <= kept.keys()]
    if missing:
        found = miniature.foreseen(backend, checkpoint, config, max_tokens, missing, progress)
        for depth, seconds in zip(missing, found, strict=True):
            kept |= {key: (value, time.time()) for key, value in zip(named[depth], seconds, strict=True)}
        machine.write(name, kept)
    return {depth: Seconds(*(kept[key][0] for key in named[depth])) for depth in depths}


def kept_speed(
    backend: Backend, checkpoint: Checkpoint, config: CacheConfig, max_tokens: int, depths: Sequence[int]
) -> dict[int, Seconds]:
    """The same, as far as it was measured before."""
    kept, named = machine.read(_machine(backend), time.time()), _named(checkpoint, config, max_tokens, depths)
    known = [depth for depth in depths if set(named[depth]) <= kept.keys()]
    return {depth: Seconds(*(kept[key][0] for key in named[depth])) for depth in known}


def _machine(backend: Backend) -> str:
    """What figures are kept by."""
    facts = backend.facts()
    return ", ".join(facts[key] for key in ("device", "driver", "revision") if key in facts)


def _named(
    checkpoint: Checkpoint, config: CacheConfig, max_tokens: int, depths: Sequence[int]
) -> dict[int, tuple[str, str]]:
    """The names of the figures at each depth."""
    figure = miniature.figure(checkpoint, config, max_tokens)
    return {depth: (f"step {figure} at {depth}", f"first {figure} at {depth}") for depth in depths}
