"""The oracle of attention: dense, masked, in float64, without a cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Doubles
from kvarn.backends.reference.cells import repeat_heads
from kvarn.cache.spec import LayerSpec


def attend(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], spec: LayerSpec, scale: float, first: int = 0) -> Doubles:
    """q [T, n_heads, dim] at positions first.., k and v [L, n_kv_heads, dim] at positions 0.. -> [T, n_heads, v's dim].

    The content of a key that a query may not see has no effect on it."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = repeat_heads(k, spec.group), repeat_heads(v, spec.group)  # [L, n_heads, dim]
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for row, pos in enumerate(range(first, first + len(q))):
        seen = np.flatnonzero(spec.visible(pos, np.arange(len(k))))
        s = np.einsum("hd,lhd->hl", q[row], k[seen]) * scale
        p = np.exp(s - s.max(-1, keepdims=True))
        out[row] = np.einsum("hl,lhd->hd", p, v[seen]) / p.sum(-1)[:, None]
    return out
