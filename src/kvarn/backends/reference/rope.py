"""Rotary position embedding, pairs (i, i + dim/2), and its fusion with the cache write.

Keys are rotated at their absolute position before they are stored, so a ring that wraps has nothing to rotate again.
"""

import numpy as np

from kvarn.backends.reference import cells
from kvarn.cache.codec import Floats
from kvarn.cache.view import Store, Table


def frequencies(dim: int, base: float) -> Floats:
    """[dim / 2] radians per position."""
    return (base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def rotate(x: Floats, positions: np.ndarray, freqs: Floats) -> Floats:
    """x [T, heads, dim] at positions [T]."""
    angle = positions.astype(np.float32)[:, None, None] * freqs  # [T, 1, dim / 2]
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def write_rotated(k: Floats, v: Floats, freqs: Floats, store: Store, table: Table) -> None:
    """The fused form: the table says where each token stands, so a caller cannot rotate at the wrong position."""
    cells.write(rotate(k, table.positions, freqs), v, store, table)
