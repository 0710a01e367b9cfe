"""A model and its cache on a backend, in the order in which a lack of memory shows first.

A cache whose size is known is allocated before the weights are loaded. On a device whose cache takes what
is left, the weights come first.
"""

from dataclasses import replace
from typing import NamedTuple

from kvarn.backends import check_memory, place_of
from kvarn.backends.base import Backend, Memory, Program
from kvarn.cache.codec import codecs_of
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.cache.room import plan_into
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress
from kvarn.models.centre import uncentred_layers


class Loaded(NamedTuple):
    plan: Plan
    memory: Memory
    program: Program


def load(
    backend: Backend, checkpoint: Checkpoint, graph: Graph, config: CacheConfig, max_tokens: int, progress: Progress
) -> Loaded:
    check_keys(graph, config.codec)
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


def check_keys(graph: Graph, codec: str) -> None:
    """Keys in few bits spend them on a bias that is the same in all keys, unless a centre takes it out."""
    k = codecs_of(codec).k
    if k.tail and (layers := uncentred_layers(graph)):
        raise KvarnError(
            f"{k.name} keys would be wrong: layer {layers[0]} adds a bias to keys, and its centre is not known "
            "(docs/codecs.md). Keep keys in int8 or bf16, as in --cache-type int8/int4"
        )
