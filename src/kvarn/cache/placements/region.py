"""Region: each sequence has a fixed run of blocks, taken at its first reserve. The base of Slab and Cyclic.

A member says which block of the run holds logical block j (`_offset`). Sequences share no blocks, so
a fork copies all resident blocks.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placement import Placement
from kvarn.cache.residency import Residency
from kvarn.cache.spec import ceil_div
from kvarn.cache.step import Copy
from kvarn.errors import BrokenInvariant


class RegionResidency(Residency):
    __slots__ = ("base", "held")

    def __init__(self, run: int) -> None:
        super().__init__()
        self.base: int | None = None  # first block of the run
        self.held = [-1] * run  # the logical block whose content is in each block of the run; rewind needs it


class Region(Placement[RegionResidency]):
    def __init__(self, config: GroupConfig) -> None:
        super().__init__(config)
        self.run = self.blocks_per_sequence(config)
        self.n_runs = config.n_blocks // self.run
        self._free = [i * self.run for i in reversed(range(self.n_runs))]  # first blocks of free runs, lowest last

    @abstractmethod
    def _offset(self, logical: int) -> int:
        """Which block of the run holds this logical block."""

    @property
    def n_used(self) -> int:
        return sum(len(r.blocks) for r in self.sequences.values())

    def can_fork(self, parent: int) -> bool:
        return self.residency(parent).base is None or bool(self._free)

    def _new(self, salt: bytes, priority: int) -> RegionResidency:
        return RegionResidency(self.run)

    def lacks(self, length: int) -> int:
        return 0 if self._free else self.run

    def _shortfall(self, r: RegionResidency, length: int) -> int:
        return 0 if r.base is not None or self._free else self.run

    def _extend(self, r: RegionResidency, length: int) -> None:
        if r.base is None:
            r.base = self._free.pop()
        while r.end * self.block_size < length:
            self._place(r)
        r.writable = min(r.end * self.block_size, self.config.context)

    def _place(self, r: RegionResidency) -> None:
        assert r.base is not None
        offset = self._offset(r.end)
        r.held[offset] = r.end
        r.append(r.base + offset, self.block_size)

    def _committed(self, r: RegionResidency, tokens: Sequence[int]) -> None:
        pass

    def _intact_from(self, r: RegionResidency, end: int) -> int:
        lowest = end
        while lowest > self.config.pinned_blocks and r.held[self._offset(lowest - 1)] == lowest - 1:
            lowest -= 1
        return lowest

    def _rewound(self, r: RegionResidency, length: int) -> None:
        r.end = ceil_div(length, self.block_size)
        r.remove(bisect_left(r.firsts, length), len(r.blocks))

    def _forked(self, source: RegionResidency, length: int) -> RegionResidency:
        child = RegionResidency(self.run)
        if source.base is None:
            return child
        child.base = self._free.pop()
        child.committed = child.length = child.reserved = length
        for block, first in zip(source.blocks, source.firsts, strict=True):
            if first < length:
                child.end = first // self.block_size
                self._place(child)
                slots = min(self.block_size, length - first)
                self._copies.append(Copy(block, child.blocks[-1], slots))
        child.end = ceil_div(length, self.block_size)
        return child

    def _released(self, r: RegionResidency) -> None:
        if r.base is not None:
            self._free.append(r.base)

    def _check_pool(self) -> None:
        taken = [r.base for r in self.sequences.values() if r.base is not None]
        if sorted(taken + self._free) != [i * self.run for i in range(self.n_runs)]:
            raise BrokenInvariant(f"{type(self).__name__}: runs in use and free runs are not all runs, each once")
        for seq, r in self.sequences.items():
            for block, first in zip(r.blocks, r.firsts, strict=True):
                if r.base is None or block != r.base + self._offset(first // self.block_size):
                    raise BrokenInvariant(f"{type(self).__name__}: sequence {seq}: block {block} is misplaced")
