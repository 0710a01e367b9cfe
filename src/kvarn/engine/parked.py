"""Sequences kept between the turns of a conversation, for strategies that share no prefixes.

Where the cache shares (pages), what a turn computed is found again by its content and nothing needs to be kept; `keep`
then frees. Elsewhere the sequence stays open, and the next turn goes on in it from where the two texts part. What is
kept is the first to go when somebody needs the room. Token ids only.
"""

from collections.abc import Hashable
from typing import NamedTuple

from kvarn.cache.cache import KVCache


class _Sequence(NamedTuple):
    id: int
    tokens: list[int]  # computed


class Kept:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._sequences: dict[Hashable, _Sequence] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._sequences)

    def keep(self, conversation: Hashable, seq: int, tokens: list[int]) -> None:
        """The turn is over: its sequence waits for the next one, or is freed."""
        self.forget(conversation)
        if conversation is None or not tokens or self._cache.shares:
            self._cache.free(seq)
        else:
            self._sequences[conversation] = _Sequence(seq, tokens)

    def take(self, conversation: Hashable) -> _Sequence | None:
        return self._sequences.pop(conversation, None)

    def forget(self, conversation: Hashable) -> None:
        if kept := self._sequences.pop(conversation, None):
            self._cache.free(kept.id)

    def make_room(self) -> bool:
        """Give up the sequence that waited longest; False when there is none."""
        if not self._sequences:
            return False
        self.forget(next(iter(self._sequences)))
        return True
