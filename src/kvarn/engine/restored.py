"""Restored texts: texts whose cells come from elsewhere, held by sequences.

A cache that shares prefixes finds a restored text for every prompt of the same salt. In others, one parked sequence
holds it: for the next request of its conversation, or of its salt if it has none. Non-goals: files, and the cells
themselves (`kvarn.lasting`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

from kvarn.cache.cache import KVCache
from kvarn.engine.parked import ParkedSequences, scoped
from kvarn.engine.request import Request
from kvarn.engine.sources import Sources

RESTORED = "restored"  # the conversation of requests without one, after a restore into a cache that does not share


class RestoredTexts:
    """`ids` gives the numbers of new sequences."""

    def __init__(self, cache: KVCache, parked: ParkedSequences, ids: Iterator[int]) -> None:
        self._cache = cache
        self._parked = parked
        self._ids = ids
        self._sources = Sources()
        self._held: set[bytes] = set()  # salts for which a restored text is held by a sequence

    def restore(
        self,
        tokens: Sequence[int],
        write: Callable[[int], None],
        name: str,
        salt: bytes = b"",
        conversation: Hashable = None,
        priority: int = 0,
    ) -> Callable[[float], None]:
        """Take over a text: `write(seq)` restores its cells to the new sequence seq. If it raises, nothing has changed.
        Call the result with the seconds that it took, for explanations."""
        seq = next(self._ids)
        self._cache.open(seq, salt, priority)
        try:
            write(seq)
        except BaseException:
            self._cache.abandon(seq)
            raise
        if conversation is None and not self._cache.shares:
            self._held.add(salt)
            conversation = RESTORED
        self.give_back(seq, tokens, salt, conversation)
        return lambda seconds: self._sources.add(salt, list(tokens), name, seconds)

    def find(self, tokens: Sequence[int], salt: bytes = b"", conversation: Hashable = None) -> int | None:
        """An open sequence with exactly these tokens, or with whole tiles of them if cells have a tail, all committed,
        which the caller frees or parks; None if the cache no longer has them."""
        n, tile = len(tokens), self._cache.plan.tile
        whole = n - n % tile
        if not self._cache.shares:
            parked = self._parked.take(scoped(salt, conversation))
            if parked is None:
                return None
            had = parked.tokens[:n] == list(tokens[: len(parked.tokens)]) and len(parked.tokens) >= whole
            if had and self._cache.rewind(parked.id, min(n, len(parked.tokens))) >= whole:
                return parked.id
            self._cache.free(parked.id)
            return None
        seq = next(self._ids)
        if not self._cache.n_rows_free:
            return None
        self._cache.open(seq, salt)
        if self._cache.adopt(seq, [*tokens, 0], counted=False).reused == whole:
            return seq
        self._cache.free(seq)
        return None

    def give_back(self, seq: int, tokens: Sequence[int], salt: bytes = b"", conversation: Hashable = None) -> None:
        """After `find`. Only the tokens that have cells count: the next turn computes the others."""
        self._parked.park(scoped(salt, conversation), seq, list(tokens[: self._cache.length(seq)]))

    def conversation(self, salt: bytes, conversation: Hashable) -> Hashable:
        """The conversation that a request continues. One without a conversation continues the text of its salt."""
        return scoped(salt, RESTORED if conversation is None and salt in self._held else conversation)

    def note_source(self, request: Request) -> None:
        """Note in a request that starts which of its reused tokens were restored."""
        if request.adoption is not None and request.adoption.reused:
            had = request.fetched.local if request.fetched.tokens else request.adoption.reused
            request.source = self._sources.of(request.salt, request.samples[0].tokens, had)

    def clear(self) -> None:
        """The cache was emptied."""
        self._sources.clear()
        self._held.clear()
