"""Embeddings: one vector from the final hidden states of a prompt.

Contract: the vector depends on the prompt and the model only. States are added one by one, in the order of
the prompt, in float64; so chunks, batches and preemptions change no bit. Non-goals: the states themselves
(`Program.hidden`), text.
"""

import math
from collections.abc import Sequence

import numpy as np

from kvarn.arrays import Floats
from kvarn.errors import BadLogits, KvarnError

LAST, MEAN = "last", "mean"
POOLINGS = (LAST, MEAN)


class Pool:
    """`last`: the state of the last token. `mean`: the mean of all states."""

    def __init__(self, pooling: str) -> None:
        if pooling not in POOLINGS:
            raise KvarnError(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}")
        self.wants_all = pooling == MEAN
        self.n_rows = 0  # states of the prompt's first tokens that are in the sum
        self._sum = np.zeros(0)

    def take(self, rows: Sequence[Floats], first: int) -> None:
        """States of the tokens at `first` and after it. Those that a repeated step computed again are known."""
        for at, row in enumerate(rows, first):
            if not np.isfinite(row).all():
                raise BadLogits("a hidden state of the model is not finite: its weights are damaged, fetch it again")
            if not self.wants_all:
                self._sum = row.astype(np.float64)
            elif at == self.n_rows:
                self._sum = self._sum + row if self.n_rows else row.astype(np.float64)
            self.n_rows = max(self.n_rows, at + 1)

    def vector(self) -> Floats:
        """Of length 1 [hidden], or all zeros. The mean has the direction of the sum."""
        length = math.sqrt(math.fsum((self._sum * self._sum).tolist()))
        return (self._sum / (length or 1.0)).astype(np.float32)
