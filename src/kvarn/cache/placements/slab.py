"""Slab: block j of a sequence is block j of its run. Nothing ever leaves before the sequence does.

With the block as large as the context this is the plain contiguous cache: a page table with one page.
"""

from kvarn.cache.placement import GroupConfig
from kvarn.cache.placements.region import Region


class Slab(Region):
    @staticmethod
    def blocks_per_sequence(config: GroupConfig) -> int:
        return config.context_blocks

    def _offset(self, logical: int) -> int:
        return logical
