"""Cyclic: the pinned blocks stay, the rest of the run is a ring of R blocks.

    pinned 1, R 3:   logical   0 | 1 2 3 | 4 5 6 | 7 ...
                     run       0 | 1 2 3 | 1 2 3 | 1 ...

A block leaves the list at the commit after which no query can see it, so the block that takes its place overwrites
nothing visible; R is sized for that (GroupConfig.window_blocks). Positions stay absolute over any number of laps.
"""

from collections.abc import Sequence

from kvarn.cache.placement import GroupConfig
from kvarn.cache.placements.region import Region, RegionResidency
from kvarn.cache.spec import ceil_div


class Cyclic(Region):
    def __init__(self, config: GroupConfig) -> None:
        super().__init__(config)
        self.pinned = config.pinned_blocks
        self.ring = config.window_blocks

    @staticmethod
    def blocks_per_sequence(config: GroupConfig) -> int:
        return config.pinned_blocks + config.window_blocks

    def _offset(self, logical: int) -> int:
        if logical < self.pinned:
            return logical
        return self.pinned + (logical - self.pinned) % self.ring

    def _committed(self, r: RegionResidency, tokens: Sequence[int]) -> None:
        dead = self._dead_blocks(r)
        if dead:
            r.remove(dead.start, dead.stop)

    def _rewound(self, r: RegionResidency, length: int) -> None:
        # Blocks that had left the list but are not overwritten come back: behind the pinned ones the list is made anew.
        end = ceil_div(length, self.block_size)
        r.remove(min(self.pinned, end, len(r.blocks)), len(r.blocks))
        for logical in range(max(self.spec.floor(length) // self.block_size, self.pinned), end):
            r.end = logical
            self._place(r)
        r.end = end
