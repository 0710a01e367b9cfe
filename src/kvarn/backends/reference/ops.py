"""The operations in NumPy: every call computes at once.

Exact in the sense of docs/design.md: a row's bits do not depend on the rows beside it. Reductions run along one row;
products with weights have one shape, ROWS rows, padded with zeros, because BLAS rounds a row differently for another
number of rows. (That a row's place among the ROWS does not matter is tested, tests/test_ops.py.)
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.ops import Activation
from kvarn.backends.reference import rope as rotation
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.cache.spec import align
from kvarn.models.config import Rope

ROWS = 16


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
    ) -> None:
        self._weights = weights
        self._eps = np.float32(norm_eps)
        self._cache = cache
        self._tokens = tokens
        self._positions = positions
        self._rows = rows

    def embed(self, weight: str, scale: float = 1.0) -> Floats:
        x = self._weights[weight][self._tokens]
        return x if scale == 1.0 else x * np.float32(scale)

    def rms_norm(self, x: Floats, weight: str, heads: int = 1) -> Floats:
        parts = np.ascontiguousarray(x.reshape(len(x), heads, -1))
        mean = np.square(parts).mean(-1, keepdims=True)
        normed: Floats = parts / np.sqrt(mean + self._eps) * self._weights[weight]
        return normed.reshape(x.shape)

    def linear(self, x: Floats, weight: str, bias: str | None = None) -> Floats:
        y = times_transposed(x, self._weights[weight])
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
        return times_transposed(x[self._rows], self._weights[weight])

    def has(self, weight: str) -> bool:
        return weight in self._weights


def times_transposed(x: Floats, weight: Floats) -> Floats:
    """x [T, in] @ weight [out, in] transposed, in tiles of ROWS rows."""
    padded = np.zeros((align(len(x), ROWS), x.shape[1]), np.float32)
    padded[: len(x)] = x
    out = np.empty((len(padded), len(weight)), np.float32)
    for start in range(0, len(padded), ROWS):
        np.matmul(padded[start : start + ROWS], weight.T, out=out[start : start + ROWS])
    return out[: len(x)]


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinity, and the quotient 0
        result: Floats = x / (1 + np.exp(-x))
    return result


def gelu(x: Floats) -> Any:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))
