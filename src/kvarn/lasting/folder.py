"""The disk tier: a folder with one file per block, and an index of it in memory.

    DIR/<namespace>/<hash>-<group>.kvb      the namespace says what decides the bits of cells

- The index is made by listing; no data is read. `refresh` lists again, for a folder that others use too.
- A file gets its name when it is complete (whole_file.py). Nothing is synced: a file that lost data in a power
  failure is damaged, and is removed when it is read.
- Above the limit of bytes the least recently used files go, those of other namespaces included. Their times on
  disk keep that order.
- Every method may be called from any thread. Only `has` never touches the disk.
"""

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvarn.errors import KvarnError
from kvarn.lasting.block_file import Damaged, Name, cells_of, head_of
from kvarn.lasting.whole_file import sweep, write_whole

_SPACE = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}-\d{1,4}\.kvb")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in the folder must not block
MOST = 1 << 32  # bytes of a file that is read: no block is as large
LOW = 0.95  # above the limit, files are removed down to this share of it


class Folder:
    def __init__(
        self,
        root: Path,
        limit: int,
        namespace: bytes,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.root = root
        self.limit = limit
        self._namespace = namespace
        self._clock = clock
        self._lock = threading.Lock()  # of the index; never held during a system call
        self._index: dict[str, tuple[int, int]] = {}  # by path below the root: bytes, stamp
        self._nbytes = 0
        try:
            self.refresh()
        except OSError as error:
            raise KvarnError(f"disk cache {root}: {error.strerror or error}") from None

    # -- the index ---------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._index)

    def _path(self, name: Name) -> str:
        return f"{self._namespace.hex()}/{name.key.hex()}-{name.group}.kvb"

    def has(self, name: Name) -> int:
        """Bytes of its file; 0 if there is none."""
        return self._index.get(self._path(name), (0, 0))[0]

    def refresh(self) -> None:
        """List the folder. Files that dead processes left unfinished are removed."""
        found: dict[str, tuple[int, int]] = {}
        for space, info in _listed(self.root):
            if stat.S_ISDIR(info.st_mode) and _SPACE.fullmatch(space):
                sweep(self.root / space)
                with suppress(FileNotFoundError):
                    for name, file in _listed(self.root / space):
                        if stat.S_ISREG(file.st_mode) and _FILE.fullmatch(name):
                            found[f"{space}/{name}"] = file.st_size, file.st_mtime_ns
        with self._lock:
            self._index = found
            self._nbytes = sum(nbytes for nbytes, _ in found.values())

    def _enter(self, path: str, nbytes: int, stamp: int) -> None:
        with self._lock:
            self._nbytes += nbytes - self._index.get(path, (0, 0))[0]
            self._index[path] = nbytes, stamp

    def _leave(self, path: str) -> None:
        with self._lock:
            self._nbytes -= self._index.pop(path, (0, 0))[0]

    # -- files -------------------------------------------------------------------------------------------------------

    def put(self, name: Name, tokens: Sequence[int], cells: bytes, stamp: int | None = None) -> None:
        """Raises OSError, and then nothing has changed."""
        path, stamp = self._path(name), stamp or self._clock()
        (self.root / path).parent.mkdir(mode=0o700, exist_ok=True)
        nbytes = write_whole(
            self.root / path, [head_of(self._namespace, name.key, tokens, cells), cells], durable=False
        )
        self._enter(path, nbytes, stamp)
        with suppress(OSError):  # the order is then another one after a restart
            os.utime(self.root / path, ns=(stamp, stamp), follow_symlinks=False)
        self._shrink()

    def get(self, name: Name, tokens: Sequence[int]) -> bytes | None:
        """The cells; None if the file is gone. A damaged file is removed, and Damaged raised."""
        path = self._path(name)
        try:
            return cells_of(_read(self.root / path), self._namespace, name.key, tokens)
        except FileNotFoundError:
            self._leave(path)
            return None
        except (Damaged, OSError) as error:
            self.drop(name)
            raise Damaged(str(error)) from None

    def drop(self, name: Name) -> None:
        self._leave(self._path(name))
        self._remove(self.root / self._path(name))

    def touch(self, names: Iterable[Name]) -> None:
        """They were used, the first of them most recently."""
        now = self._clock()
        for age, name in enumerate(names):
            path = self._path(name)
            if entry := self._index.get(path):
                self._enter(path, entry[0], now - 1000 * age)
                with suppress(OSError):
                    os.utime(self.root / path, ns=(now - 1000 * age,) * 2, follow_symlinks=False)

    def _shrink(self) -> None:
        if self._nbytes <= self.limit:
            return
        with self._lock:
            oldest = sorted(self._index, key=lambda path: self._index[path][1])
        for path in oldest:
            if self._nbytes <= LOW * self.limit:
                return
            self._leave(path)
            self._remove(self.root / path)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()


def _listed(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process removed it
                yield entry.name, entry.stat(follow_symlinks=False)


def _read(path: Path) -> bytes:
    file = os.open(path, _READ)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MOST:
            raise Damaged("this is not a file of a block")
        parts = []
        while part := os.read(file, info.st_size + 1):
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)
