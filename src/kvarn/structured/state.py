"""The state of one sample that follows a structure: the constraint that the engine asks.

Contract: `mask` and `complete` are functions of the answer's tokens. The state only saves work: it takes the
tokens that are new, and begins again if the tokens that it has seen are not those of the answer. So
preemption, forks and repeated steps need nothing from it. One thread at a time asks; the next mask is
computed by another thread beside the model's step, which begins after `complete`.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Doubles
from kvarn.errors import KvarnError

if TYPE_CHECKING:
    from llguidance import LLMatcher


_MOST_THREADS = 4


class _Threads:
    """Compute masks. llguidance does it without the interpreter's lock. A forked process has none of the threads, so
    it makes its own."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def bitmask(self, matcher: "LLMatcher") -> "Future[bytes]":
        if self._pool is None:
            n = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4))
            self._pool = ThreadPoolExecutor(n, "kvarn-masks")
        return self._pool.submit(matcher.compute_bitmask)


_threads = _Threads()


class Guided:
    """Follows a structure from its first token."""

    def __init__(self, fresh: "LLMatcher") -> None:
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._seen: list[int] = []
        self._coming: Future[bytes] | None = None  # the mask after what was seen; until then the matcher is in use

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        scores[~self.allowed(output, len(scores))] = -np.inf

    def allowed(self, output: Sequence[int], n_tokens: int) -> NDArray[np.bool_]:
        """[n_tokens]"""
        self._follow(output)
        coming = self._settled()
        bits = np.frombuffer(self._matcher.compute_bitmask() if coming is None else coming, np.uint8)
        self._check()
        return np.unpackbits(bits, count=n_tokens, bitorder="little").view(np.bool_)

    def takes(self, output: Sequence[int], token: int) -> bool:
        """Whether the token may come next."""
        self._follow(output)
        self._settled()
        return self._matcher.validate_tokens([token]) == 1

    def complete(self, output: Sequence[int]) -> bool:
        """Whether nothing but the end token can come next."""
        self._follow(output)
        self._settled()
        if self._matcher.is_stopped():
            return True
        self._coming = _threads.bitmask(self._matcher)
        return False

    def _settled(self) -> bytes | None:
        """The mask that was begun, if there is one. The matcher is free again."""
        coming, self._coming = self._coming, None
        return None if coming is None else coming.result()

    def _follow(self, output: Sequence[int]) -> None:
        n = len(self._seen)
        if n == len(output) and self._seen == output[:n] and self._coming is not None:
            return
        self._settled()
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
