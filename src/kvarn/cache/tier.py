"""Names of blocks for tiers, which hold the bytes of blocks outside of the cache: in host memory, in a folder.

A tier knows a block by its group and by the chained, salted hash of its tokens. It also keeps the tokens and
compares them.
"""

from collections.abc import Callable
from typing import NamedTuple


class Spilled(NamedTuple):
    """A full block with its content: it is about to be evicted, or it is resident."""

    group: int
    key: bytes  # the chained, salted hash
    tokens: tuple[int, ...]
    block: int
    wanted: bool  # seen more than once: reused, computed again after an eviction, or left with a priority


class Place(NamedTuple):
    """A full block of a prompt, and whether the cache has it."""

    key: bytes
    tokens: tuple[int, ...]
    resident: bool


Spill = Callable[[Spilled], None]
