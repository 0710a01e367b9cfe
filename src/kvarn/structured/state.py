"""The state of one sample that follows a structure: the constraint that the engine asks.

Contract: `mask` and `complete` are functions of the answer's tokens. The state only saves work: it takes the
tokens that are new, and begins again if the tokens that it has seen are not those of the answer. So
preemption, forks and repeated steps need nothing from it. One thread at a time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Doubles
from kvarn.errors import KvarnError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guided:
    """Follows a structure from its first token."""

    def __init__(self, fresh: "LLMatcher") -> None:
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._seen: list[int] = []

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        scores[~self.allowed(output, len(scores))] = -np.inf

    def allowed(self, output: Sequence[int], n_tokens: int) -> NDArray[np.bool_]:
        """[n_tokens]"""
        self._follow(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=n_tokens, bitorder="little").view(np.bool_)

    def takes(self, output: Sequence[int], token: int) -> bool:
        """Whether the token may come next."""
        self._follow(output)
        return self._matcher.validate_tokens([token]) == 1

    def complete(self, output: Sequence[int]) -> bool:
        """Whether nothing but the end token can come next."""
        self._follow(output)
        return self._matcher.is_stopped()

    def _follow(self, output: Sequence[int]) -> None:
        n = len(self._seen)
        if self._seen != output[:n]:
            self._matcher, self._seen, n = self._fresh.deep_copy(), [], 0
        for token in output[n:]:
            self._matcher.consume_token(token)
            self._seen.append(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise KvarnError(f"the structure of this request cannot be followed further: {reason}")
