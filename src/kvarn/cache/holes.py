"""A *hole*: positions of a restored text whose cells were never written, because they are outside of its window."""

from collections.abc import Iterable

from kvarn.cache.spec import LayerSpec


def sees(spec: LayerSpec, hole: range, length: int) -> bool:
    """Whether a query at `length` sees a position of the hole."""
    if not hole or length <= hole.start:
        return False
    return bool(spec.floor(length) < hole.stop or spec.pinned > hole.start)


def sees_whole_blocks(spec: LayerSpec, block_size: int, pinned_blocks: int, length: int, hole: range) -> bool:
    """Whether all blocks that a query at `length` sees are without a position of the hole."""
    floor = max(spec.floor(length), 0)
    pinned = pinned_blocks * block_size if floor else 0
    return not hole or (min(pinned, length) <= hole.start and floor // block_size * block_size >= hole.stop)


def overlapping(blocks: Iterable[tuple[int, int]], block_size: int, hole: range) -> list[int]:
    """Of these blocks, each with its first position, those that have a position of the hole."""
    return [block for block, first in blocks if hole and first < hole.stop and first + block_size > hole.start]
