"""The block pool: a free list, reference counts, and the unreferenced blocks that are kept for reuse.

A block is in exactly one of three states: free, live (referenced), cached (unreferenced, but `keep` answered that its
content may be wanted). Taking a block prefers a free one; then the least recently used cached block is evicted. A block
with priority p is passed over p times, each time as if it had just been used; nothing is pinned. All operations are
O(1), eviction amortized. Integers only.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvarn.errors import BrokenInvariant


class BlockPool:
    def __init__(
        self,
        n_blocks: int,
        keep: Callable[[int], bool],
        evicted: Callable[[int], None],
        watermarks: tuple[float, float] | None = None,
    ) -> None:
        self.n_blocks = n_blocks
        self.references = [0] * n_blocks
        self._lives = [0] * n_blocks  # how often eviction still passes over a block's content
        self.n_evicted = 0
        self._keep = keep  # asked when the last reference goes: is the content worth keeping?
        self._evicted = evicted  # told when a cached block's content is given up
        self._free = list(reversed(range(n_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        high, low = watermarks or (1.0, 1.0)
        self._high, self._low = int(high * n_blocks), int(low * n_blocks)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> list[int]:
        """The first to be evicted stands first."""
        return list(self._cached)

    @property
    def n_live(self) -> int:
        return self.n_blocks - self.available

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A block for new content, with one reference. The caller has looked at `available`."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self.references[block] = 1
        self._lives[block] = 0
        return block

    def share(self, block: int) -> None:
        """One more reference to a live or cached block."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def release(self, block: int, priority: int = 0) -> None:
        """One reference less; a block without any becomes the most recent cached one, or free."""
        self.references[block] -= 1
        self._lives[block] = max(self._lives[block], priority)
        if self.references[block] == 0:
            if self._keep(block):
                self._cached[block] = None
                self._trim()
            else:
                self._free.append(block)

    def discard(self, block: int) -> None:
        """A cached block's content turned out to be worthless."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        while self._lives[block]:
            self._lives[block] -= 1
            self._cached[block] = None
            block, _ = self._cached.popitem(last=False)
        self.n_evicted += 1
        self._free.append(block)
        self._evicted(block)

    def _trim(self) -> None:
        """Past the high watermark, evict down to the low one. The default marks (all blocks) never bind."""
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
