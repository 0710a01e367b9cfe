"""The tier in host memory: blocks as bytes, the least recently used leave first. One thread at a time uses it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvarn.lasting.block_file import Name


class Held(NamedTuple):
    name: Name
    tokens: tuple[int, ...]
    cells: bytes
    wanted: bool  # see cache.tier.Spilled


class HostMemoryTier:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._blocks: OrderedDict[Name, Held] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Held]:
        """Most recently used first."""
        return reversed(self._blocks.values())

    def has(self, name: Name) -> int:
        """Bytes of its cells; 0 if it is not here."""
        held = self._blocks.get(name)
        return 0 if held is None else len(held.cells)

    def put(self, held: Held) -> list[Held]:
        """Keep a block. Returns the blocks that had to leave for it, or the block itself if it is too large."""
        if len(held.cells) > self.limit:
            return [held]
        self._drop(held.name)
        self._blocks[held.name] = held
        self.nbytes += len(held.cells)
        left = []
        while self.nbytes > self.limit:
            _, oldest = self._blocks.popitem(last=False)
            self.nbytes -= len(oldest.cells)
            left.append(oldest)
        return left

    def get(self, name: Name, tokens: Sequence[int]) -> bytes | None:
        """The cells; None if they are not here, or belong to other tokens with the same hash."""
        held = self._blocks.get(name)
        if held is None or held.tokens != tuple(tokens):
            return None
        self._blocks[name] = held._replace(wanted=True)
        self._blocks.move_to_end(name)
        return held.cells

    def touch(self, name: Name) -> None:
        self._blocks.move_to_end(name)

    def _drop(self, name: Name) -> None:
        held = self._blocks.pop(name, None)
        self.nbytes -= 0 if held is None else len(held.cells)
