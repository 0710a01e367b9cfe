"""What a model needs on a device with memory of its own. There is no forecast of its speed.

Weights are what `backends/cuda/limits.py` counts. The cache takes what is left, as `cache/room.py` decides. Context,
workspace and margin are one number there, and here.
"""

from dataclasses import dataclass, replace

from kvarn.backends.choice import BESIDE
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.cache.room import plan_into
from kvarn.errors import OutOfMemory
from kvarn.loading.checkpoint import Checkpoint

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
