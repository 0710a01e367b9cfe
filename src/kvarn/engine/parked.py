"""Parked sequences: sequences that stay open between the turns of a conversation.

With a paged cache `park` frees the sequence, because prefix sharing finds its content again. With other
strategies the sequence stays open, and the next turn rewinds it to the common prefix. The scheduler
drops parked sequences first when it needs room.
"""

from collections.abc import Hashable
from typing import NamedTuple

from kvarn.cache.cache import KVCache


class Parked(NamedTuple):
    id: int  # the sequence in the cache
    tokens: list[int]  # the tokens in it


class ParkedSequences:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._sequences: dict[Hashable, Parked] = {}  # by conversation, oldest first

    def __len__(self) -> int:
        return len(self._sequences)

    def park(self, conversation: Hashable, seq: int, tokens: list[int]) -> None:
        """Keep the sequence for the conversation's next turn. Free it if the next turn cannot use it."""
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

    def clear(self) -> None:
        """Forget all parked sequences. The cache has been reset and no longer has them."""
        self._sequences.clear()

    def drop_oldest(self) -> bool:
        """Free the oldest parked sequence; False if there is none."""
        if not self._sequences:
            return False
        self.drop(next(iter(self._sequences)))
        return True


def scoped(salt: bytes, conversation: Hashable) -> Hashable:
    """Requests with different salts are never in the same conversation."""
    return None if conversation is None else (salt, conversation)
