"""llama.cpp's rounding of activations, to tell its noise from our errors.

llama.cpp multiplies quantized weights with activations rounded to 8 bits: per 32 values for the simple types, per 256
for the K and IQ types. kvarn's reference keeps them in f32. With the same rounding in front of each product, the two
should predict a text equally well. Test code: nothing of the product rounds like this.
"""

from collections.abc import Mapping

import numpy as np
from support.harness import pool

from kvarn.backends.reference.ops import ReferenceOps
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.models.config import ModelConfig


def per_32(x: np.ndarray) -> np.ndarray:
    """Q8_0 and Q8_1: amax / 127, the scale kept in f16."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(scale > 0, np.rint(blocks / scale), 0)
    return (q * scale.astype(np.float16).astype(np.float32)).reshape(x.shape).astype(np.float32)


def per_256(x: np.ndarray) -> np.ndarray:
    """Q8_K: the value of largest magnitude becomes -127, the scale stays f32."""
    blocks = x.reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[:, None], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest != 0, np.float32(-127) / largest, 0)
        q = np.minimum(np.rint(inverse * blocks), 127)
        return np.where(inverse != 0, q / inverse, 0).reshape(x.shape).astype(np.float32)


class RoundingOps(ReferenceOps):
    def __init__(self, types: Mapping[str, str], *args) -> None:
        super().__init__(*args)
        self._types = types

    def _round(self, x: np.ndarray, weight: str) -> np.ndarray:
        kind = self._types[weight]
        if kind in ("F32", "F16", "BF16"):
            return x
        return per_256(x) if kind.endswith("_K") or kind.startswith("IQ") else per_32(x)

    def linear(self, x, weight, bias=None):
        return super().linear(self._round(x, weight), weight, bias)

    def logits(self, x, weight):
        rows = self._rows
        self._rows = np.arange(len(rows))
        try:
            return super().logits(self._round(x[rows], weight), weight)
        finally:
            self._rows = rows


class RoundingProgram(ReferenceProgram):
    """A reference program that rounds as llama.cpp does, by the types that the file stores."""

    def __init__(self, config: ModelConfig, weights: dict[str, np.ndarray], types: Mapping[str, str]) -> None:
        super().__init__(config, weights, pool())
        self._types = types

    def _ops(self, memory, tokens, wanted):
        ids, rows = np.array(tokens, np.int64), np.array(wanted, np.int64)
        return RoundingOps(self._types, self._weights, self.config.norm_eps, memory, ids, rows, self._pool)
