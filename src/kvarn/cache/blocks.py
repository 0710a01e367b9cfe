"""The block pool: a free list, reference counts and an LRU list of cached blocks.

A block is in exactly one of three states:

    free      no content
    live      at least one sequence references it
    cached    no reference, but its content can be reused (`keep` returned True)

`take` prefers a free block. If there is none, it evicts the least recently used cached block. Eviction
skips a block of priority p up to p times and moves it to the recent end of the LRU list. A block is
never pinned. All operations are O(1); eviction is amortized O(1).

`touched` is called with every block that an operation changes. While nobody watches, it does nothing.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvarn.errors import BrokenInvariant


class BlockPool:
    def __init__(
        self,
        n_blocks: int,
        keep: Callable[[int], bool],
        evicted: Callable[[int], None],
        watermarks: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.n_blocks = n_blocks
        self.references = [0] * n_blocks
        self.used = [0.0] * n_blocks  # when the last reference to each cached block was released
        self.touched: Callable[[int], object] = _unwatched
        self._clock = clock
        self._skips = [0] * n_blocks  # how often eviction still skips each block
        self.n_evicted = 0
        self._keep = keep  # called when the last reference is released: can the content be reused?
        self._evicted = evicted  # called when a cached block is evicted
        self._free = list(reversed(range(n_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        high, low = watermarks or (1.0, 1.0)
        self._high, self._low = int(high * n_blocks), int(low * n_blocks)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> list[int]:
        """In order of eviction."""
        return list(self._cached)

    def next_evicted(self, n: int) -> list[int]:
        """The first n cached blocks in order of eviction."""
        return list(islice(self._cached, n))

    @property
    def n_live(self) -> int:
        return self.n_blocks - self.available

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A block for new content, with one reference. `available` must not be 0."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self.references[block] = 1
        self._skips[block] = 0
        self.touched(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a live or cached block."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1
        self.touched(block)

    def release(self, block: int, priority: int = 0) -> None:
        """Remove a reference. Without references, the block becomes the most recent cached block, or free."""
        self.references[block] -= 1
        self._skips[block] = max(self._skips[block], priority)
        self.touched(block)
        if self.references[block] == 0:
            if self._keep(block):
                self.used[block] = self._clock()
                self._cached[block] = None
                self._trim()
            else:
                self._free.append(block)

    def discard(self, block: int) -> None:
        """The block's content cannot be reused: if it is cached, free it."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
            self.touched(block)

    def unwatch(self) -> None:
        self.touched = _unwatched

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        while self._skips[block]:
            self._skips[block] -= 1
            self._cached[block] = None
            block, _ = self._cached.popitem(last=False)
        self.n_evicted += 1
        self._free.append(block)
        self._evicted(block)
        self.touched(block)

    def _trim(self) -> None:
        """Above the high watermark, evict down to the low one. With the default (all blocks) nothing is evicted."""
        if self.n_blocks - len(self._free) > self._high:
            while self._cached and self.n_blocks - len(self._free) > self._low:
                self._evict()

    def check(self) -> None:
        free, cached = set(self._free), set(self._cached)
        live = {b for b, n in enumerate(self.references) if n > 0}
        if len(free) != len(self._free) or free & cached or free & live or cached & live:
            raise BrokenInvariant("a block is in two states at once")
        if len(free) + len(cached) + len(live) != self.n_blocks or min(self.references, default=0) < 0:
            raise BrokenInvariant("a block is in no state: leaked, or released twice")


def _unwatched(block: int) -> None:
    """Nobody wants to know."""
