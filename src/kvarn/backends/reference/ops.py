"""The operations of graph/ops.py in NumPy. Every call computes at once.

The bits of a row do not depend on the other rows (docs/design.md). Sums and elementary functions are
those of kvarn.arithmetic. Everything else consists of single IEEE operations per element.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvarn.arithmetic import dots, exp
from kvarn.arrays import Floats
from kvarn.backends.host import HostMemory
from kvarn.backends.reference import rope as rotation
from kvarn.graph.ops import Activation, Centre, Rope
from kvarn.models.centre import centre_vector
from kvarn.native import Pool


class ReferenceOps:
    """The operations of one step, which the memory has already applied. Logits are computed for `rows` only."""

    def __init__(
        self,
        weights: Mapping[str, Floats],
        norm_eps: float,
        memory: HostMemory,
        tokens: NDArray[np.int64],  # [T]
        rows: NDArray[np.int64],
        pool: Pool,
    ) -> None:
        self._weights = weights
        self._eps = np.float32(norm_eps)
        self._memory = memory
        self._tokens = tokens
        self._rows = rows
        self._pool = pool
        self.hidden = np.empty(0, np.float32)  # [rows, hidden] the input of the logits

    def embed(self, weight: str, scale: float = 1.0) -> Floats:
        x = self._weights[weight][self._tokens]
        return x if scale == 1.0 else x * np.float32(scale)

    def rms_norm(self, x: Floats, weight: str, heads: int = 1) -> Floats:
        parts = np.ascontiguousarray(x.reshape(len(x), heads, 1, -1))
        mean = dots(parts, parts) / np.float32(parts.shape[-1])  # [T, heads, 1, 1]
        normed: Floats = parts / np.sqrt(mean + self._eps) * self._weights[weight]
        return normed.reshape(x.shape)

    def linear(self, x: Floats, weight: str, bias: str | None = None) -> Floats:
        y = dots(x, self._weights[weight], self._pool)
        return y if bias is None else y + self._weights[bias]

    def rope(self, x: Floats, heads: int, rope: Rope) -> Floats:
        return rotation.apply(x.reshape(len(x), heads, -1), self._memory.positions, rope).reshape(x.shape)

    def centred(self, k: Floats, heads: int, centre: Centre) -> Floats:
        return k - centre_vector(centre, self._weights[centre.bias], heads)

    def attention(self, layer: int, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
        spec, rows = self._memory.spec(layer), len(q)
        keys, values = k.reshape(rows, -1, spec.k_dim), v.reshape(rows, -1, spec.v_dim)
        self._memory.write(layer, np.ascontiguousarray(keys), np.ascontiguousarray(values))
        queries = np.ascontiguousarray(q.reshape(rows, -1, spec.k_dim))
        return self._memory.attend(layer, queries, scale).reshape(rows, -1)

    def gated(self, gate: Floats, up: Floats, activation: Activation) -> Floats:
        return ACTIVATIONS[activation](gate) * up

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def logits(self, x: Floats, weight: str) -> Floats:
        self.hidden = x[self._rows]
        return dots(self.hidden, self._weights[weight], self._pool)

    def has(self, weight: str) -> bool:
        return weight in self._weights


def silu(x: Floats) -> Floats:
    return (x / (1 + exp(-x.astype(np.float64)))).astype(np.float32)


def gelu(x: Floats) -> Floats:
    """The tanh approximation, computed as 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))."""
    wide = x.astype(np.float64)
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + exp(-2 * inner))).astype(np.float32)


ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {"silu": silu, "gelu": gelu}
