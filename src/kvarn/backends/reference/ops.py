"""The operations in NumPy: every call computes at once.

Exact in the sense of docs/design.md: a row's bits do not depend on the rows beside it. Sums and elementary functions
are kvarn.arithmetic's; all else is single IEEE operations on elements.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvarn.arithmetic import dots, exp
from kvarn.backends.reference import rope as rotation
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.graph.ops import Activation, Rope
from kvarn.isa import Pool


class ReferenceOps:
    """One step: `tokens` at the positions that the cache prepared; logits for the rows in `rows`."""

    def __init__(
        self,
        weights: Mapping[str, Floats],
        norm_eps: float,
        cache: KVCache,
        tokens: NDArray[np.int64],  # [T]
        positions: NDArray[np.int32],  # [T]
        rows: NDArray[np.intp],
        pool: Pool,
    ) -> None:
        self._weights = weights
        self._eps = np.float32(norm_eps)
        self._cache = cache
        self._tokens = tokens
        self._positions = positions
        self._rows = rows
        self._pool = pool

    def embed(self, weight: str, scale: float = 1.0) -> Floats:
        x = self._weights[weight][self._tokens]
        return x if scale == 1.0 else x * np.float32(scale)

    def rms_norm(self, x: Floats, weight: str, heads: int = 1) -> Floats:
        parts = np.ascontiguousarray(x.reshape(len(x), heads, 1, -1))
        mean = dots(parts, parts, self._pool) / np.float32(parts.shape[-1])  # [T, heads, 1, 1]
        normed: Floats = parts / np.sqrt(mean + self._eps) * self._weights[weight]
        return normed.reshape(x.shape)

    def linear(self, x: Floats, weight: str, bias: str | None = None) -> Floats:
        y = dots(x, self._weights[weight], self._pool)
        return y if bias is None else y + self._weights[bias]

    def rope(self, x: Floats, heads: int, rope: Rope) -> Floats:
        return rotation.apply(x.reshape(len(x), heads, -1), self._positions, rope).reshape(x.shape)

    def attention(self, layer: int, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
        spec = self._cache.spec(layer)
        shape = (len(q), -1, spec.head_dim)
        self._cache.write(layer, np.ascontiguousarray(k.reshape(shape)), np.ascontiguousarray(v.reshape(shape)))
        return self._cache.attend(layer, np.ascontiguousarray(q.reshape(shape)), scale).reshape(q.shape)

    def gated(self, gate: Floats, up: Floats, activation: Activation) -> Floats:
        return (silu(gate) if activation == "silu" else gelu(gate)) * up

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def logits(self, x: Floats, weight: str) -> Floats:
        return dots(x[self._rows], self._weights[weight], self._pool)

    def has(self, weight: str) -> bool:
        return weight in self._weights


def silu(x: Floats) -> Floats:
    return (x / (1 + exp(-x.astype(np.float64)))).astype(np.float32)


def gelu(x: Floats) -> Floats:
    """The tanh approximation; 0.5 (1 + tanh z) is 1 / (1 + exp(-2 z))."""
    wide = x.astype(np.float64)
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + exp(-2 * inner))).astype(np.float32)
