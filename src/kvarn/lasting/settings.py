"""Which tiers a user asked for, checked before a model is loaded; and the tiers that follow."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvarn.backends.base import Memory
from kvarn.cache.cache import KVCache
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.strategy import AUTO, STRATEGIES
from kvarn.errors import KvarnError
from kvarn.lasting.folder import Folder
from kvarn.lasting.host import HostMemoryTier
from kvarn.lasting.tiers import BlockTiers, namespace_of
from kvarn.words import bytes_of

DEFAULT_BYTES = 10 << 30  # of a folder


class TierSettings(NamedTuple):
    host_bytes: int | None
    folder: Path | None
    folder_bytes: int

    def __bool__(self) -> bool:
        return self.host_bytes is not None or self.folder is not None

    def strategy(self, name: str) -> str:
        """The cache strategy to use for this one. `auto` becomes paged: blocks can come back only where prefixes are
        shared."""
        if not self or name not in (AUTO, *STRATEGIES):
            return name
        chosen = "paged" if name == AUTO else name
        if not PLACEMENTS[STRATEGIES[chosen].placement].shares:
            raise KvarnError(
                f"the cache strategy {chosen} shares no prefixes, so nothing could be read back from a host or disk "
                "cache: use paged or sliding"
            )
        return chosen

    def open(self, cache: KVCache, memory: Memory, fingerprint: Callable[[], str]) -> BlockTiers:
        host = None if self.host_bytes is None else HostMemoryTier(self.host_bytes)
        folder = None
        if self.folder is not None:
            folder = Folder(self.folder, self.folder_bytes, namespace_of(fingerprint(), cache.plan))
        return BlockTiers(cache, memory, host, folder)


def tier_settings(host_cache: int | None, disk_cache: str | Path | None) -> TierSettings:
    """`disk_cache` is DIR or DIR:BYTES. A Path is a folder, whatever its name."""
    if host_cache is not None and (not isinstance(host_cache, int) or isinstance(host_cache, bool) or host_cache < 1):
        raise KvarnError(f"host_cache is {host_cache!r}; it must be a number of bytes, at least 1")
    if disk_cache is None:
        return TierSettings(host_cache, None, 0)
    if not isinstance(disk_cache, str | Path) or not str(disk_cache):
        raise KvarnError(f"disk_cache is {disk_cache!r}; it must be a folder, or DIR:BYTES as in cache:20G")
    folder, nbytes = Path(disk_cache), DEFAULT_BYTES
    if isinstance(disk_cache, str) and ":" in disk_cache:
        name, _, size = disk_cache.rpartition(":")
        given = bytes_of(size)
        if given is not None and name:
            folder, nbytes = Path(name), given
    if nbytes < 1:
        raise KvarnError(f"disk_cache is {str(disk_cache)!r}; it must have room for at least 1 byte")
    folder = folder.expanduser().absolute()
    _check_folder(folder)
    return TierSettings(host_cache, folder, nbytes)


def _check_folder(folder: Path) -> None:
    """Before a model is loaded."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
        os.listdir(folder)
    except OSError as error:
        raise KvarnError(f"disk cache {folder}: {error.strerror or error}") from None
    if mode & stat.S_IWOTH:
        raise KvarnError(f"disk cache {folder}: every user of this machine can write there: chmod 700 it first")
