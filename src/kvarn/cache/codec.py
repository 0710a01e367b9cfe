"""The codec axis: how a cell is encoded.

`define` is the codec written in NumPy, obviously right, and the oracle for `encode`, the native routine that every
write uses: a cell's bits are part of the contract, so one place makes them. `widen` is exact. A codec with scales
keeps one f32 per (slot, head): a cell's value is widen(cell) * scale. Members live in `codecs/`, one file each.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Cells(NamedTuple):
    cells: NDArray[Any]  # [rows, dim]
    scales: Floats | None  # [rows]


class Codec(Protocol):
    name: str
    dtype: np.dtype[Any]
    scaled: bool

    def define(self, x: Floats) -> Cells: ...

    def encode(self, x: Floats) -> Cells: ...

    def widen(self, cells: NDArray[Any]) -> Floats: ...


SCALE_BYTES = 4


def row_bytes(codec: Codec, dim: int) -> int:
    """Bytes of one head's vector at one position, its scale included."""
    return dim * codec.dtype.itemsize + (SCALE_BYTES if codec.scaled else 0)
