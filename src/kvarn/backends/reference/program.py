"""A model on the reference backend: f32 weights, and a call of the model's forward function for each step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.arrays import Floats
from kvarn.backends.base import Span
from kvarn.backends.host import HostLogits, HostMemory
from kvarn.backends.reference.ops import ReferenceOps
from kvarn.cache.step import Step
from kvarn.errors import KvarnError
from kvarn.models.config import ModelConfig
from kvarn.models.families import family_of
from kvarn.native import Pool


class ReferenceProgram:
    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Floats],
        pool: Pool | None = None,
        forward: Callable[[Any, ModelConfig], Any] | None = None,
    ) -> None:
        self.config = config
        self._weights = weights
        self._pool = pool or Pool(1)
        self._forward = forward or family_of(config).forward

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def workspace(self) -> int:
        return 0  # every step allocates its own arrays

    def run(self, memory: HostMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> HostLogits:
        return HostLogits(self._compute(memory, step, tokens, wanted)[0])

    def hidden(self, memory: HostMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
        return self._compute(memory, step, tokens, wanted)[1]

    def _compute(
        self, memory: HostMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """Logits and hidden states of the wanted rows."""
        memory.apply(step)
        ops = self._ops(memory, tokens, wanted)
        logits: Floats = self._forward(ops, self.config)
        return logits, ops.hidden

    def _ops(self, memory: HostMemory, tokens: Sequence[int], wanted: Sequence[int]) -> ReferenceOps:
        ids, rows = np.array(tokens, np.int64), np.array(wanted, np.int64)
        return ReferenceOps(self._weights, self.config.norm_eps, memory, ids, rows, self._pool)

    def trace(self, on: bool) -> None:
        raise KvarnError("the reference backend cannot trace: use the cpu backend")

    def timings(self) -> list[Span]:
        return []
