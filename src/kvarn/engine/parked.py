"""Sequences that stay open between the turns of a conversation, for strategies that share no prefixes.

With paged caches `park` simply frees the sequence: its content is found again by prefix sharing. With other strategies
the sequence stays open, and the next turn rewinds it to the prefix that both turns have in common. Parked sequences
are dropped first when room is needed. Token ids only.
"""

from collections.abc import Hashable
from typing import NamedTuple

from kvarn.cache.cache import KVCache


class Parked(NamedTuple):
    id: int  # the sequence in the cache
    tokens: list[int]  # whose keys and values it holds


class ParkedSequences:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._sequences: dict[Hashable, Parked] = {}  # by conversation, the longest unused first

    def __len__(self) -> int:
        return len(self._sequences)

    def park(self, conversation: Hashable, seq: int, tokens: list[int]) -> None:
        """Keep the sequence for the conversation's next turn, or free it if nothing would be gained."""
        self.drop(conversation)
        if conversation is None or not tokens or self._cache.shares:
            self._cache.free(seq)
        else:
            self._sequences[conversation] = Parked(seq, tokens)

    def take(self, conversation: Hashable) -> Parked | None:
        return self._sequences.pop(conversation, None)

    def drop(self, conversation: Hashable) -> None:
        if parked := self._sequences.pop(conversation, None):
            self._cache.free(parked.id)

    def drop_oldest(self) -> bool:
        """Free the sequence that was parked first; False when there is none."""
        if not self._sequences:
            return False
        self.drop(next(iter(self._sequences)))
        return True
