"""Rotary position embedding, in pairs (i, i + dim/2).

A key is rotated by its absolute position before it is stored, so a ring that wraps rotates nothing again.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.arithmetic import sin_cos
from kvarn.arrays import Floats
from kvarn.graph.ops import Rope
from kvarn.models.rope import frequencies, magnitude


def apply(x: Floats, positions: NDArray[Any], rope: Rope) -> Floats:
    """Rotate x [T, heads, head_dim] by positions [T]. Dimensions from rope.dim on do not change."""
    angle = positions.astype(np.float64)[:, None, None] * frequencies(rope)  # [T, 1, dim / 2]
    scale = magnitude(rope)
    sin, cos = ((scale * x).astype(np.float32) for x in sin_cos(angle))
    half = rope.dim // 2
    a, b, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)
