"""One prompt's blocks on their way from tiers into the cache.

Files are read by a thread of their own, a few ahead. The engine's thread plants what has arrived, in order, some
blocks per step. The fetch ends early at a block that does not come: it is damaged or gone, there is no room, or it
is later than the time in which the tokens could have been computed. What came before it is reused.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvarn.cache.adoption import Fetched, Reason, ReuseLimit
from kvarn.cache.tier import Place
from kvarn.lasting.block_file import Damaged, Name

PER_STEP = 16  # blocks that are planted between two steps: about the time of a small step
AHEAD = 32 << 20  # bytes of files that are read ahead of planting
HOST, DISK = "host", "disk"


@dataclass(slots=True, eq=False)
class Item:
    """A block that is needed."""

    group: int
    logical: int
    name: Name
    tokens: tuple[int, ...]
    tier: str
    nbytes: int
    arrived: bool = False
    cells: bytes | None = None
    damaged: bool = False


class Source(Protocol):
    """What a fetch needs of tiers and of the cache."""

    def request(self, item: Item, wanted: Callable[[], bool]) -> bool:
        """Read the item's file on another thread, if it is still wanted then. False if the queue is full."""

    def held(self, item: Item) -> bytes | None:
        """The item's cells in host memory."""

    def plant(self, seq: int, group: int, places: Sequence[Place], cells: bytes) -> bool: ...

    def reached(self, seq: int, tokens: Sequence[int]) -> int:
        """Tokens of the prompt that the cache has itself now."""

    def used(self, names: Iterable[Name]) -> None:
        """These files were read."""


class BlockFetch:
    def __init__(
        self,
        source: Source,
        seq: int,
        tokens: Sequence[int],
        local: int,
        length: int,
        groups: Sequence[Sequence[Place]],
        items: Sequence[Item],
        seconds: float,
    ) -> None:
        """`length` tokens can be reused with all items, `local` without them. `seconds`: how long they may take."""
        self._source = source
        self._seq, self._tokens = seq, tokens
        self._local, self._length = local, length
        self._groups, self._items = groups, items
        self._start = time.monotonic()
        self._until = self._start + seconds
        self._requested = 0  # items
        self._planted = 0
        self._host_seconds = 0.0
        self._limit: ReuseLimit | None = None
        self._size = len(items[0].tokens)
        self.over = False
        self.facts = Fetched(asked=True, local=local)

    def advance(self) -> bool:
        """Plant what has arrived; True at the end."""
        for _ in range(PER_STEP):
            self._read_ahead()
            if self.over or self._planted == len(self._items):
                break
            item = self._items[self._planted]
            if item.tier == HOST:
                item.cells, item.arrived = self._source.held(item), True
            if not item.arrived:
                if time.monotonic() > self._until:
                    self._stop(Reason.TOO_SLOW)
                break
            self._take(item)
        if self._planted == len(self._items):
            self._stop(None)
        return self.over

    def cancel(self) -> None:
        self.over = True

    def _read_ahead(self) -> None:
        """Keep the reader busy, but not more bytes in memory than necessary."""
        waiting = sum(item.nbytes for item in self._items[self._planted : self._requested] if item.tier == DISK)
        while self._requested < len(self._items) and waiting < AHEAD:
            item = self._items[self._requested]
            if item.tier == DISK and not self._source.request(item, lambda: not self.over):
                return
            waiting += item.nbytes if item.tier == DISK else 0
            self._requested += 1

    def _take(self, item: Item) -> None:
        if item.cells is None:
            return self._stop(Reason.DAMAGED if item.damaged else Reason.EVICTED)
        start, places = time.monotonic(), self._groups[item.group][: item.logical + 1]
        if not self._source.plant(self._seq, item.group, places, item.cells):
            return self._stop(Reason.EVICTED)  # others have taken the room
        item.cells = None
        self._planted += 1
        if item.tier == HOST:
            self._host_seconds += time.monotonic() - start
        return None

    def _stop(self, reason: Reason | None) -> None:
        self.over = True
        if reason is not None:
            self._limit = ReuseLimit(reason, self._length)
        seconds = time.monotonic() - self._start
        host, disk = self._tokens_by_tier()
        self.facts = Fetched(
            asked=True,
            local=self._local,
            host_tokens=host,
            host_seconds=min(self._host_seconds if disk else seconds, seconds) if host else 0.0,
            disk_tokens=disk,
            disk_seconds=seconds - (self._host_seconds if host else 0.0) if disk else 0.0,
            limit=self._limit,
        )
        files = [item.name for item in self._items[: self._planted] if item.tier == DISK]
        if files:
            self._source.used(files)

    def _tokens_by_tier(self) -> tuple[int, int]:
        """Tokens that are reused because of host memory, and because of files.

        A block that is not needed, because it is out of the window, counts with the next one that was planted."""
        reached = min(self._source.reached(self._seq, self._tokens), self._length)
        came = {item.logical: item.tier for item in reversed(self._items[: self._planted])}
        counts, tier = {HOST: 0, DISK: 0}, next(reversed(came.values()), HOST) if came else HOST
        for logical in range(-(-reached // self._size) - 1, self._local // self._size - 1, -1):
            if all(places[logical].resident for places in self._groups):
                continue
            tier = came.get(logical, tier)
            counts[tier] += min((logical + 1) * self._size, reached) - max(logical * self._size, self._local)
        return counts[HOST], counts[DISK]


def read(item: Item, get: Callable[[Name, Sequence[int]], bytes | None], nbytes: int) -> None:
    """On the reader's thread: fill the item. `nbytes`: what the cells of its group must have."""
    try:
        cells = get(item.name, item.tokens)
        item.damaged = cells is not None and len(cells) != nbytes
        item.cells = None if item.damaged else cells
    except Damaged:
        item.damaged = True
    item.arrived = True
