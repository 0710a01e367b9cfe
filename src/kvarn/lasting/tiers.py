"""Host memory and a folder behind the cache: evicted blocks go there, and prompts get them back.

    evicted -> host memory -> (its least recently used) -> folder        without host memory: evicted -> folder

A prompt's blocks are read if that is expected to be faster than computing them; both speeds are measured. Files
are read by a thread of its own (fetch.py). spilling.py has the way out.

It is what `engine.recall.Tiers` asks for.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from kvarn.backends.base import Memory
from kvarn.cache.adoption import Fetched, Reason, ReuseLimit
from kvarn.cache.border import Border
from kvarn.cache.cache import KVCache
from kvarn.cache.cover import needed, reach
from kvarn.cache.plan import Plan
from kvarn.cache.tier import Place
from kvarn.lasting.block_file import Name
from kvarn.lasting.fetch import DISK, HOST, BlockFetch, Item, read
from kvarn.lasting.folder import Folder
from kvarn.lasting.host import HostMemoryTier
from kvarn.lasting.lane import Lane
from kvarn.lasting.pace import Rate
from kvarn.lasting.spilling import QUEUED, Count, Spilling
from kvarn.words import file_size

GUESS = 500.0  # tokens per second that are computed, until a step was measured
LEAST_SECONDS = 0.05  # that a fetch may take
STUCK = 1.0  # seconds after which a file that is still being read makes the folder too slow for others
REFRESH = 15.0  # seconds between two listings of the folder


class _Over:
    """A fetch that has nothing to read."""

    over = True

    def __init__(self, local: int, limit: ReuseLimit | None = None) -> None:
        self.facts = Fetched(asked=True, local=local, limit=limit)

    def advance(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


def namespace_of(fingerprint: str, plan: Plan) -> bytes:
    """The blocks that may be exchanged: equal cells, in blocks of the same shape."""
    shapes = [(group.layers, group.config.block_size) for group in plan.groups]
    return blake2b(f"{fingerprint} {shapes}".encode(), digest_size=16).digest()


class BlockTiers:
    def __init__(
        self,
        cache: KVCache,
        memory: Memory,
        host: HostMemoryTier | None,
        folder: Folder | None,
        patience: float = 10.0,
    ) -> None:
        self._counts = {HOST: Count(), DISK: Count()}
        self._sizes = [len(memory.read_block(group, 0)) for group in range(len(cache.plan.groups))]
        self._spilling = Spilling(memory, self._sizes, host, folder, self._counts, patience)
        self._border = Border(cache, self._spilling.evicted)
        self._memory = memory
        self._host, self._folder = host, folder
        self._reader = Lane("kvarn-tier-reader", QUEUED, patience)
        self._arrived = threading.Event()
        self._computing, self._reading, self._planting = Rate(GUESS), Rate(), Rate()
        self._listed = time.monotonic()

    # -- back into the cache -----------------------------------------------------------------------------------------

    def begin(self, seq: int, tokens: Sequence[int], spare: int) -> BlockFetch | _Over | None:
        self._list_again()
        local, groups = self._border.seek(seq, tokens)
        size = self._border.configs[0].block_size
        stored = 0
        for tiers in ((HOST, DISK), (HOST,)):  # if files are too slow, host memory may still be fast
            where = [[self._where(g, place, tiers) for place in places] for g, places in enumerate(groups)]
            have = [
                [place.resident or bool(w) for place, w in zip(places, found, strict=True)]
                for places, found in zip(groups, where, strict=True)
            ]
            length = reach(have, self._border.configs, max(len(tokens) - 1, 0) // size * size)
            if length - local < size:
                break
            stored = max(stored, length)
            items = self._items(groups, where, length)
            allowed = self._computing.seconds(length - local)
            if self._expected(items) < allowed:
                if not self._border.hold(seq, tokens, length, min(len(tokens) - length, spare)):
                    return None
                return BlockFetch(self, seq, tokens, local, length, groups, items, max(allowed, LEAST_SECONDS))
        self._measure_again(groups)
        return _Over(local, ReuseLimit(Reason.NOT_WORTH_IT, stored) if stored else None)

    def _where(self, group: int, place: Place, tiers: Sequence[str]) -> str:
        name = Name(group, place.key)
        if self._host is not None and self._host.has(name):
            return HOST
        return DISK if DISK in tiers and self._folder is not None and self._folder.has(name) else ""

    def _items(self, groups: list[list[Place]], where: list[list[str]], length: int) -> list[Item]:
        found = [
            Item(g, logical, Name(g, place.key), place.tokens, where[g][logical], self._sizes[g])
            for g, config in enumerate(self._border.configs)
            for logical in needed(length, config)
            if not (place := groups[g][logical]).resident
        ]
        return sorted(found, key=lambda item: (item.logical, item.group))

    def _expected(self, items: Sequence[Item]) -> float:
        """Seconds until all items are in the cache."""
        files = sum(item.nbytes for item in items if item.tier == DISK)
        if files and self._reader.busy_seconds > STUCK:
            return float("inf")
        reading = self._reading.seconds(files + self._reader.nbytes) if files else 0.0
        return reading + self._planting.seconds(sum(item.nbytes for item in items))

    def _measure_again(self, groups: list[list[Place]]) -> None:
        """A slow disk may have become fast: read one block that nobody waits for."""
        folder = self._folder
        if folder is None or self._reader.nbytes or self._reader.busy_seconds:
            return
        for group, places in enumerate(groups):
            for place in places:
                if not place.resident and folder.has(Name(group, place.key)):
                    item = Item(group, 0, Name(group, place.key), place.tokens, DISK, self._sizes[group])
                    self.request(item, lambda: True)
                    return

    def _list_again(self) -> None:
        if self._folder is not None and time.monotonic() - self._listed > REFRESH:
            self._listed = time.monotonic()
            self._spilling.refresh()

    # -- for a fetch ---------------------------------------------------------------------------------------------------

    def request(self, item: Item, wanted: Callable[[], bool]) -> bool:
        def job() -> None:
            if wanted():
                self._read(item)

        return self._reader.offer(job, item.nbytes)

    def _read(self, item: Item) -> None:
        """On the reader's thread."""
        assert self._folder is not None
        start = time.monotonic()
        read(item, self._folder.get, self._sizes[item.group])
        self._reading.add(item.nbytes, time.monotonic() - start)
        if item.cells is not None:
            self._counts[DISK].reads += 1
        if item.damaged:
            self._counts[DISK].drops += 1
        self._arrived.set()

    def held(self, item: Item) -> bytes | None:
        assert self._host is not None
        cells = self._host.get(item.name, item.tokens)
        self._counts[HOST].reads += cells is not None
        return cells

    def plant(self, seq: int, group: int, places: Sequence[Place], cells: bytes) -> bool:
        start = time.monotonic()
        planted = self._border.plant(seq, group, places, lambda block: self._memory.write_block(group, block, cells))
        if planted:
            self._planting.add(len(cells), time.monotonic() - start)
        return planted

    def reached(self, seq: int, tokens: Sequence[int]) -> int:
        return self._border.seek(seq, tokens)[0]

    def used(self, names: Iterable[Name]) -> None:
        self._spilling.touch(list(names))

    # -- for the engine and for metrics --------------------------------------------------------------------------------

    def drain(self) -> str:
        """Store everything that is resident or in host memory, as far as the folder's limit allows."""
        return self._spilling.drain(self._border.resident())

    def words(self) -> str:
        parts = [] if self._host is None else [f"{file_size(self._host.limit)} of host memory"]
        if self._folder is not None:
            has = f"{file_size(self._folder.nbytes)} of at most {file_size(self._folder.limit)}"
            parts.append(f"{self._folder.root} with {has}")
        return ", ".join(parts)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= self._border.configs[0].block_size:  # a few tokens take as long as many
            self._computing.add(tokens, seconds)

    def wait(self, seconds: float) -> None:
        self._arrived.wait(seconds)
        self._arrived.clear()

    def counts(self) -> dict[str, Count]:
        """By tier."""
        found = {}
        if self._host is not None:
            self._counts[HOST].nbytes = self._host.nbytes
            found[HOST] = self._counts[HOST]
        if self._folder is not None:
            self._counts[DISK].nbytes = self._folder.nbytes
            found[DISK] = self._counts[DISK]
        return found
