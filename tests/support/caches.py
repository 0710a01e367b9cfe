"""A small cache on the current backend, and one step of writes to it."""

import numpy as np
from support.harness import Driven, backend

from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

SPEC = LayerSpec(6, 2, 5, 5)  # three query heads per KV head, rows of an odd width


def cache_of(
    strategy: str = "contiguous", context: int = 64, codec: str = "f32", spec=SPEC, layers=1, place=None, **kw
) -> Driven:
    return Driven(CacheConfig([spec] * layers, context, strategy, codec, **kw), place or backend())


def write_step(cache: Driven, k: np.ndarray, v: np.ndarray, seq: int = 0) -> None:
    """Write these rows to every layer as the sequence's next tokens."""
    start = cache.length(seq)
    assert cache.reserve(seq, start + len(k))
    cache.prepare([seq])
    for layer in range(len(cache.stores)):
        cache.write(layer, k, v)
    cache.commit(seq, range(start, start + len(k)))
