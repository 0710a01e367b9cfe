"""f32: the value itself."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.codec import Cells, Floats


class F32:
    name = "f32"
    dtype: np.dtype[Any] = np.dtype(np.float32)
    scaled = False

    def define(self, x: Floats) -> Cells:
        return Cells(x, None)

    encode = define

    def widen(self, cells: NDArray[Any]) -> Floats:
        return cells
