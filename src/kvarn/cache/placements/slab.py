"""Slab: block j of a sequence is block j of its run. A block stays until the sequence is freed.

If one block holds the whole context, this is the contiguous cache: a page table with one page.
"""

from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placements.region import Region


class Slab(Region):
    @staticmethod
    def blocks_per_sequence(config: GroupConfig) -> int:
        return config.context_blocks

    def _offset(self, logical: int) -> int:
        return logical
