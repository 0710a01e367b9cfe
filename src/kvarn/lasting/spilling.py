"""The way of blocks out of the cache, into host memory and into a folder.

- The engine's thread copies cells into host memory. Files are written by a thread of its own. If the writer's
  queue is full, the block is dropped and counted: a step never waits for a disk.
- Host memory takes every evicted block. The folder takes blocks that were seen twice or have a priority, and at the
  end everything that is resident.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvarn.backends.base import Memory
from kvarn.cache.tier import Spilled
from kvarn.lasting.block_file import Name
from kvarn.lasting.fetch import DISK, HOST
from kvarn.lasting.folder import Folder
from kvarn.lasting.host import Held, HostMemoryTier
from kvarn.lasting.lane import Lane
from kvarn.words import counted, file_size

log = logging.getLogger("kvarn")
QUEUED = 128 << 20  # bytes that may wait for the writer


@dataclass(slots=True)
class Count:
    nbytes: int = 0
    reads: int = 0  # blocks that prompts got
    writes: int = 0  # blocks that were stored
    drops: int = 0  # blocks that were lost: the queue was full, the disk failed, the file was damaged


class Spilling:
    def __init__(
        self,
        memory: Memory,
        sizes: Sequence[int],
        host: HostMemoryTier | None,
        folder: Folder | None,
        counts: dict[str, Count],
        patience: float,
    ) -> None:
        """`sizes`: bytes of a block, by group."""
        self._memory = memory
        self._sizes = sizes
        self._host, self._folder = host, folder
        self._counts = counts
        self._writer = Lane("kvarn-tier-writer", QUEUED, patience)
        self._queued: set[Name] = set()  # on their way into the folder
        self._failure = ""  # the last error of the folder that was logged

    def evicted(self, spilled: Spilled) -> None:
        """A block is about to be evicted. On the engine's thread."""
        name = Name(spilled.group, spilled.key)
        if self._host is not None:
            if self._host.has(name):
                self._host.touch(name)
            else:
                self._keep(Held(name, spilled.tokens, self._cells(spilled), spilled.wanted))
        elif spilled.wanted and not self._stored(name):
            self._store(name, spilled.tokens, lambda: self._cells(spilled), self._writer.offer)

    def _keep(self, held: Held) -> None:
        assert self._host is not None
        self._counts[HOST].writes += 1
        for left in self._host.put(held):
            if left is held:
                self._counts[HOST].drops += 1
            if left.wanted and not self._stored(left.name):
                self._store(left.name, left.tokens, _given(left.cells), self._writer.offer)

    def _cells(self, spilled: Spilled) -> bytes:
        return self._memory.read_block(spilled.group, spilled.block)

    def _stored(self, name: Name) -> bool:
        """Whether the folder has the block, or will. True without a folder: nothing is left to do."""
        return self._folder is None or name in self._queued or self._folder.has(name) > 0

    def _store(
        self,
        name: Name,
        tokens: tuple[int, ...],
        cells: Callable[[], bytes],
        queue: Callable[[Callable[[], None], int], bool],
        stamp: int | None = None,
    ) -> bool:
        nbytes = self._sizes[name.group]
        if queue == self._writer.offer and not self._writer.has_room(nbytes):  # before the cells are copied
            self._counts[DISK].drops += 1
            return False
        self._queued.add(name)
        if queue(partial(self._write, name, tokens, cells(), stamp), nbytes):
            return True
        self._queued.discard(name)
        self._counts[DISK].drops += 1
        return False

    def _write(self, name: Name, tokens: tuple[int, ...], cells: bytes, stamp: int | None) -> None:
        """On the writer's thread."""
        assert self._folder is not None
        try:
            self._folder.put(name, tokens, cells, stamp)
            self._counts[DISK].writes += 1
            self._failure = ""
        except OSError as error:
            self._counts[DISK].drops += 1
            failure = error.strerror or str(error)
            if failure != self._failure:
                log.warning("disk cache %s: %s; blocks are dropped", self._folder.root, failure)
            self._failure = failure
        finally:
            self._queued.discard(name)

    def drain(self, resident: Iterable[Spilled]) -> str:
        """Store these blocks and those in host memory, as far as the folder's limit allows. Returns what was done, in
        words; empty if nothing was."""
        if self._folder is None:
            return ""
        start, before, left = time.monotonic(), self._counts[DISK].writes, self._folder.limit
        stamp = time.time_ns()
        for name, tokens, cells in self._all(resident):
            left -= self._sizes[name.group]
            if left < 0:
                break
            stamp -= 1000  # the first is the last to be removed
            if not self._stored(name) and not self._store(name, tokens, cells, self._writer.put, stamp):
                log.warning("disk cache %s: no block was written for a while; the rest is lost", self._folder.root)
                return ""
        self._writer.finish()
        written, seconds = self._counts[DISK].writes - before, time.monotonic() - start
        words = f"wrote {counted(written, 'block')} to {self._folder.root} in {seconds:.1f} s"
        return f"{words}; it has {file_size(self._folder.nbytes)}" if written else ""

    def _all(self, resident: Iterable[Spilled]) -> Iterator[tuple[Name, tuple[int, ...], Callable[[], bytes]]]:
        for spilled in resident:
            yield Name(spilled.group, spilled.key), spilled.tokens, partial(self._cells, spilled)
        for held in self._host or ():
            yield held.name, held.tokens, _given(held.cells)

    # -- other work of the writer's thread -----------------------------------------------------------------------------

    def touch(self, names: Sequence[Name]) -> None:
        """These files were read."""
        if self._folder is not None:
            self._writer.offer(partial(self._folder.touch, names))

    def refresh(self) -> None:
        """List the folder again."""
        self._writer.offer(self._refresh)

    def _refresh(self) -> None:
        assert self._folder is not None
        try:
            self._folder.refresh()
        except OSError as error:
            log.warning("disk cache %s: %s", self._folder.root, error.strerror or error)


def _given(cells: bytes) -> Callable[[], bytes]:
    return lambda: cells
