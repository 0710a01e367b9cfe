"""Cyclic: the first blocks of a run are pinned, the other R blocks are a ring.

    pinned 1, R 3:   logical   0 | 1 2 3 | 4 5 6 | 7 ...
                     run       0 | 1 2 3 | 1 2 3 | 1 ...

`commit` removes a block from the list when no later query can see it. R is large enough that a new
block never overwrites a visible one (GroupConfig.window_blocks). Positions stay absolute after any
number of laps.
"""

from collections.abc import Sequence

from kvarn.cache.group_config import GroupConfig
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
        # Blocks that commit removed, but that are not overwritten, come back: rebuild the list after the pinned blocks.
        end, begun = ceil_div(length, self.block_size), length - length % self.config.tile
        lowest = max(self.spec.floor(begun) // self.block_size, self._intact_from(r, end))
        r.remove(min(self.pinned, end, len(r.blocks)), len(r.blocks))
        for logical in range(max(lowest, self.pinned), end):
            r.end = logical
            self._place(r)
        r.end = end
