"""Arithmetic that gives the same bits on every machine, with every NumPy and every C library.

NumPy's exp, log, sin, sum, mean, einsum and matmul choose their instructions by processor, array length
and position in the array. The order of rounding then differs. Results that affect an answer are
therefore computed here: elementary functions in float64 (native/elementary.hpp) and sums of products in
a fixed order (native/dots.hpp). NumPy is used for single IEEE operations (+ - * / sqrt, comparisons,
conversions), which every processor rounds in the same way, and for cumsum, which has only one order.
"""

from math import prod

import numpy as np
from numpy.typing import NDArray

from kvarn import native
from kvarn.arrays import Doubles, Floats

# Raise it with every change after which the same request can get other bits: when a digest in tests/golden/bits.json
# changes, or the sampler draws another token from the same logits. `system_fingerprint` has it.
VERSION = 5

_ONE_THREAD = native.Pool(1)


def exp(x: Doubles) -> Doubles:
    """The result is infinity above 709.78 and 0 below -708."""
    out = np.empty(x.shape)
    native.exp(np.ascontiguousarray(x).reshape(-1), out.reshape(-1))
    return out


def log(x: Doubles) -> Doubles:
    out = np.empty(x.shape)
    native.log(np.ascontiguousarray(x).reshape(-1), out.reshape(-1))
    return out


def sin_cos(x: Doubles) -> tuple[Doubles, Doubles]:
    sin, cos = np.empty(x.shape), np.empty(x.shape)
    native.sin_cos(np.ascontiguousarray(x).reshape(-1), sin.reshape(-1), cos.reshape(-1))
    return sin, cos


def total(x: Doubles) -> Doubles:
    """The sum over the last axis, in ascending order."""
    return np.asarray(np.cumsum(x, axis=-1)[..., -1])


def dots(a: Floats, b: Floats, pool: native.Pool = _ONE_THREAD) -> Floats:
    """a [..., m, k] times b [..., n, k] transposed -> [..., m, n]. Each sum is in float64 and rounded once."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    (*batch, m, k), n = a.shape, b.shape[-2]
    out = np.empty((prod(batch), m, n), np.float32)
    native.dots(pool, a.reshape(len(out), m, k), b.reshape(len(out), n, -1), out)
    return out.reshape(*batch, m, n)


def weigh(weights: Floats, seen: NDArray[np.bool_], v: Floats) -> Floats:
    """weights [batch, m, j] times v [batch, j, d] -> [batch, m, d]. Terms where seen [m, j] is false are left out,
    whatever they hold."""
    batch, m, _ = weights.shape
    out = np.empty((batch, m, v.shape[-1]), np.float32)
    native.weigh(np.ascontiguousarray(weights), np.ascontiguousarray(seen), np.ascontiguousarray(v), out)
    return out
