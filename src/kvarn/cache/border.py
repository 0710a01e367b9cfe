"""The border between a cache and its tiers: blocks that leave, and blocks that come back before a prompt starts.

    open -> seek -> hold -> plant ... plant -> adopt          (any of them may be left out; `free` ends it early)

`plant` writes cells at once, not in a step. So it refuses while a copy is pending, which may read or write the
block that it would take. Call it before the first `reserve` of a step. Integers only: `write` has the bytes.
"""

from collections.abc import Callable, Sequence

from kvarn.cache.cache import KVCache
from kvarn.cache.cover import needed
from kvarn.cache.placements.paged import Paged
from kvarn.cache.sharing import match
from kvarn.cache.spec import ceil_div
from kvarn.cache.tier import Place, Spill, Spilled
from kvarn.errors import KvarnError


class Border:
    def __init__(self, cache: KVCache, spill: Spill) -> None:
        if not cache.shares:
            raise KvarnError(
                f"the cache strategy {cache.plan.strategy.name} shares no prefixes, so nothing could be read back from "
                "a host or disk cache: use --cache paged or sliding"
            )
        self._cache = cache
        self.configs = [group.config for group in cache.plan.groups]
        cache.spill_to(spill)

    def _groups(self) -> list[Paged]:
        return [placement for placement in self._cache.placements if isinstance(placement, Paged)]

    def resident(self) -> list[Spilled]:
        with self._cache.lock:
            return [each for placement in self._groups() for each in placement.shelf.resident()]

    def seek(self, seq: int, tokens: Sequence[int]) -> tuple[int, list[list[Place]]]:
        """How many tokens of a prompt the cache has itself, and the full blocks of each group."""
        with self._cache.lock:
            local = match(self._cache.placements, seq, tokens, self._cache.plan.tile).reused
            return local, [p.shelf.places(p.residency(seq), tokens) for p in self._groups()]

    def hold(self, seq: int, tokens: Sequence[int], length: int, spare: int) -> bool:
        """Until `adopt`, nobody may evict the resident blocks that reuse of `length` tokens needs. False if the others
        and `spare` more tokens do not fit beside them now; then call `free`."""
        with self._cache.lock:
            for p in self._groups():
                r = p.residency(seq)
                p.shelf.hold(r, tokens, length)
                more = len(list(needed(length, p.config))) - len(r.held) + ceil_div(spare, p.block_size)
                if more > p.pool.available:
                    return False
            return True

    def plant(self, seq: int, group: int, places: Sequence[Place], write: Callable[[int], None]) -> bool:
        """Put the last of these blocks of the group into the cache. False, with no change, if that cannot be now."""
        with self._cache.lock:
            placement = self._groups()[group]
            if placement.pending_copies:
                return False
            return placement.shelf.plant(placement.residency(seq), places, write)
