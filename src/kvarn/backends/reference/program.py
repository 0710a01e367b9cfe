"""A model ready to run on the reference backend: f32 weights in memory, and one call per step."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.reference.ops import ReferenceOps
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.isa import Pool
from kvarn.models.architectures import forward_of
from kvarn.models.config import ModelConfig


class ReferenceProgram:
    def __init__(self, config: ModelConfig, weights: dict[str, Floats], pool: Pool | None = None) -> None:
        self.config = config
        self._weights = weights
        self._pool = pool or Pool(1)
        self._forward: Callable[[Any, ModelConfig], Any] = forward_of(config.architecture)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def workspace(self) -> int:
        return 0  # arrays are made anew in every step

    def run(
        self, cache: KVCache, tokens: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> Floats:
        """Logits [len(rows), vocabulary] of these rows of the step that `cache` has prepared."""
        ops = ReferenceOps(self._weights, self.config.norm_eps, cache, tokens, positions, rows, self._pool)
        logits: Floats = self._forward(ops, self.config)
        return logits
