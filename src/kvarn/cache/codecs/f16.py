"""f16: IEEE half, rounded half to even; 65,520 and above become infinity."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn import isa
from kvarn.cache.codec import Cells, Floats


class F16:
    name = "f16"
    dtype: np.dtype[Any] = np.dtype(np.float16)
    scaled = False

    def define(self, x: Floats) -> Cells:
        with np.errstate(over="ignore"):
            return Cells(x.astype(np.float16), None)

    def encode(self, x: Floats) -> Cells:
        cells = np.empty(x.shape, np.uint16)
        isa.native.encode_f16(x, cells)
        return Cells(cells.view(np.float16), None)

    def widen(self, cells: NDArray[Any]) -> Floats:
        return cells.astype(np.float32)
