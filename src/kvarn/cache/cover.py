"""Which blocks the next query of a sequence needs, and how far the blocks that we have reach. Decides; changes
nothing."""

from collections.abc import Iterator, Sequence

from kvarn.cache.group_config import GroupConfig
from kvarn.cache.spec import ceil_div


def covered(have: Sequence[bool], length: int, config: GroupConfig) -> int:
    """The longest length <= `length` for which we have every block that the next query sees.

    Reuse ends before a missing block. The window of the new end then reaches further back, so earlier blocks are
    checked too."""
    size = config.block_size
    for logical in range(min(config.pinned_blocks, len(have))):
        if not have[logical]:
            length = min(length, logical * size)
    logical = ceil_div(length, size) - 1
    while logical >= max(config.spec.floor(length) // size, 0):
        if not have[logical]:
            length = logical * size
        logical -= 1
    return length


def reach(have: Sequence[Sequence[bool]], configs: Sequence[GroupConfig], length: int) -> int:
    """The longest length <= `length` that all groups cover. A shorter one moves the windows, so each group is asked
    again."""
    while (least := min(map(covered, have, (length,) * len(configs), configs))) < length:
        length = least
    return length


def needed(length: int, config: GroupConfig) -> Iterator[int]:
    """The logical blocks that the next query of a sequence of `length` tokens sees, ascending."""
    lowest = max(config.spec.floor(length) // config.block_size, 0)
    yield from range(min(config.pinned_blocks, lowest))
    yield from range(lowest, ceil_div(length, config.block_size))
