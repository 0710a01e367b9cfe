"""int8: scale = amax / 127 as f32 per (slot, head), cells rounded half to even, a zero vector has scale 0.

A vector with an infinity or a NaN in it gets scale NaN, so that it decodes to NaN rather than to something plausible.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn import isa
from kvarn.cache.codec import Cells, Floats


class Int8:
    name = "int8"
    dtype: np.dtype[Any] = np.dtype(np.int8)
    scaled = True

    def define(self, x: Floats) -> Cells:
        amax = np.abs(x).max(-1)
        scales = np.where(np.isfinite(amax), amax / np.float32(127), np.float32(np.nan)).astype(np.float32)
        usable = (scales > 0)[:, None]
        ratio = np.divide(x, scales[:, None], out=np.zeros_like(x), where=usable)
        return Cells(np.rint(np.clip(ratio, -127, 127)).astype(np.int8), scales)

    def encode(self, x: Floats) -> Cells:
        cells, scales = np.empty(x.shape, np.int8), np.empty(x.shape[0], np.float32)
        isa.native.encode_int8(x, cells, scales)
        return Cells(cells, scales)

    def widen(self, cells: NDArray[Any]) -> Floats:
        return cells.astype(np.float32)
