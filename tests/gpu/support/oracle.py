"""What kernels compute, in float64, apart from kvarn's own code."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Doubles = NDArray[np.float64]


def norm(x: Array, weight: Array, eps: float) -> Doubles:
    wide = x.astype(np.float64)
    mean: Doubles = (wide**2).mean(-1, keepdims=True)
    return wide / np.sqrt(mean + eps) * weight


def gate(activation: str, gate: Array, up: Array) -> Doubles:
    g = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        if activation == "silu":
            return g / (1 + np.exp(-g)) * up
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * up


def rotated(x: Array, cos: Array, sin: Array) -> Doubles:
    """x [T, heads, dim]; cos and sin [T, half]. Number i turns with number i + half."""
    half = cos.shape[1]
    out = x.astype(np.float64).copy()
    a, b = out[..., :half].copy(), out[..., half : 2 * half].copy()
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    out[..., :half] = a * c - b * s
    out[..., half : 2 * half] = b * c + a * s
    return out


def relative(found: Array, expected: Array, size: Array | None = None) -> float:
    """The largest error, relative to `size` or to the expected number itself. A NaN where none is expected is an
    infinite error."""
    if found.shape != expected.shape or (np.isnan(found) != np.isnan(expected)).any():
        return float("inf")
    size = np.abs(expected) if size is None else size
    return float(np.nanmax(np.abs(found - expected) / np.maximum(size, 1e-30), initial=0.0))
