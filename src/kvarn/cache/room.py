"""The default size of a cache on a device with memory of its own: what is left there, up to a number of blocks.

A block that holds tokens costs about 1.5 KB of the host's memory, for its place in the prefix tree, and
1 us in `KVCache.check`, which runs when the engine becomes idle. So a small model does not get all of a
large device.
"""

from dataclasses import replace

from kvarn.cache.plan import CacheConfig, Plan, plan

MOST_BLOCKS = 1 << 15  # 50 MB and 33 ms; a million tokens in blocks of 32


def plan_into(room: int, config: CacheConfig, default_layout: str, most_blocks: int = MOST_BLOCKS) -> Plan:
    """As many blocks as fit `room` bytes: at most `most_blocks`, or what the sequences need if that is more."""
    needed = plan(config, default_layout)
    whole = plan(replace(config, cache_bytes=room), default_layout)
    surplus = whole.n_blocks - max(most_blocks, needed.n_blocks)
    if surplus <= 0:
        return whole
    growing = [group for group in whole.groups if group.blocks_per_sequence >= group.config.context_blocks]
    row = sum(len(group.layers) * group.parts.block_bytes for group in growing)  # one block more in each
    return plan(replace(config, cache_bytes=whole.nbytes - -(-surplus // len(growing)) * row), default_layout)
