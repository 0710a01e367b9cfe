"""A store over pages that a test made itself: [page, layer, slot, head, dim] or [page, slot, head, dim]."""

import numpy as np

from kvarn.arrays import Cells
from kvarn.backends.base import Counters
from kvarn.backends.host import Store
from kvarn.cache.codec import Codec, CodecPair
from kvarn.errors import BadArray


def over_pages(k: Cells, v: Cells, codec: Codec, counters: Counters, layer: int = 0) -> Store:
    """The store is a view of the pages."""
    if codec.scale_unit:
        raise BadArray(f"pages have no scales, and {codec.name} cells need them: use f32, f16 or bf16 pages")
    if k.ndim not in (4, 5):
        raise BadArray(f"pages of rank {k.ndim}: give [page, layer, slot, head, dim] or [page, slot, head, dim]")
    if k.shape[:-1] != v.shape[:-1] or k.dtype != np.dtype(codec.unit) or v.dtype != np.dtype(codec.unit):
        raise BadArray(
            f"pages of K {k.shape} {k.dtype} and V {v.shape} {v.dtype} must agree and hold {codec.name} cells"
        )
    if not 0 <= layer < (k.shape[1] if k.ndim == 5 else 1):
        raise BadArray(f"layer {layer} is not in pages of shape {k.shape}")
    pick = (slice(None), layer) if k.ndim == 5 else ()
    pair = CodecPair(codec, codec)
    return Store(k[pick].swapaxes(1, 2)[:, None], v[pick].swapaxes(1, 2)[:, None], None, None, pair, counters)
