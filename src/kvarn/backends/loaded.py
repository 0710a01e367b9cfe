"""A model and its cache on a backend, in the order in which a lack of memory shows first.

A cache whose size is known is allocated before the weights are loaded. On a device whose cache takes what
is left, the weights come first.
"""

from dataclasses import replace
from typing import NamedTuple

from kvarn.backends import check_memory, place_of
from kvarn.backends.base import Backend, Memory, Program
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.cache.room import plan_into
from kvarn.errors import OutOfMemory
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress


class Loaded(NamedTuple):
    plan: Plan
    memory: Memory
    program: Program


def load(
    backend: Backend, checkpoint: Checkpoint, graph: Graph, config: CacheConfig, max_tokens: int, progress: Progress
) -> Loaded:
    config = replace(config, ahead=backend.ahead)
    planned = plan(config, backend.default_layout)  # wrong settings fail before anything is loaded
    if config.cache_bytes is None and backend.room() is not None:
        program = backend.load(checkpoint, graph, max_tokens, progress)
        room = backend.room() or 0
        try:
            planned = plan_into(room, config, backend.default_layout)
        except OutOfMemory:
            raise OutOfMemory(
                f"{place_of(backend)} has {room / 2**20:,.0f} MiB left beside the weights, too little for keys and "
                "values: lower the context (-c) or the sequences at once (-np), or use --backend cpu"
            ) from None
        return Loaded(planned, backend.memory(planned), program)
    check_memory(planned, backend)
    memory = backend.memory(planned)
    return Loaded(planned, memory, backend.load(checkpoint, graph, max_tokens, progress))
