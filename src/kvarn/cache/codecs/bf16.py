"""bf16: the upper half of an f32, rounded half to even. NumPy has no such type, so a cell is a uint16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn import isa
from kvarn.cache.codec import Cells, Floats


class BF16:
    name = "bf16"
    dtype: np.dtype[Any] = np.dtype(np.uint16)
    scaled = False

    def define(self, x: Floats) -> Cells:
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return Cells(np.where(np.isnan(x), quiet, rounded).astype(np.uint16), None)

    def encode(self, x: Floats) -> Cells:
        cells = np.empty(x.shape, np.uint16)
        isa.native.encode_bf16(x, cells)
        return Cells(cells, None)

    def widen(self, cells: NDArray[Any]) -> Floats:
        return (cells.astype(np.uint32) << 16).view(np.float32)
