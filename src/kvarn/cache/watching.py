"""Somebody watches a cache: what changed in its blocks since the last look. Nothing is noted while nobody does."""

from collections.abc import Sequence
from threading import RLock
from typing import Any

from kvarn.cache.journal import Changes, Journal, TreeJournal
from kvarn.cache.placement import Placement
from kvarn.cache.usage import PrefixCount


class Watching:
    """Its calls may come from any thread, as those of the cache."""

    def __init__(self, lock: RLock, prefixes: PrefixCount) -> None:
        self._lock = lock
        self._prefixes = prefixes
        self._placements: Sequence[Placement[Any]] = ()
        self._journals: list[Journal | TreeJournal] = []  # one per group while somebody watches

    def reset(self, placements: Sequence[Placement[Any]]) -> None:
        """The cache has forgotten everything, and these are its placements now."""
        self._placements = placements
        if self._journals:
            self.start()

    def start(self) -> None:
        """Note changes from now on, for `changes`. There is one watcher at most: a second one takes its place."""
        with self._lock:
            self._journals = [placement.journal() for placement in self._placements]

    def stop(self) -> None:
        with self._lock:
            for journal in self._journals:
                journal.close()
            self._journals = []

    def changes(self) -> Changes:
        """What changed since the last call; everything at the first call after `start`."""
        with self._lock:
            return Changes(
                [journal.take() for journal in self._journals],
                sum(p.n_evicted for p in self._placements),
                self._prefixes.queries,
                self._prefixes.hits,
                {reason.value: n for reason, n in (+self._prefixes.misses).items()},
            )

    def leaves(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """Of each group: the number of the last full block of this text that is known, or NOWHERE."""
        with self._lock:
            return [placement.leaf(tokens, salt) for placement in self._placements]

    def content(self, group: int, blocks: Sequence[int], salt: bytes) -> dict[int, tuple[int, ...]]:
        """The tokens in these blocks of a group: of those that were written with this salt."""
        with self._lock:
            placement = self._placements[group]
            found = {block: placement.content(block, salt) for block in blocks}
            return {block: tokens for block, tokens in found.items() if tokens}
