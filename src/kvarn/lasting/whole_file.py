"""Writes a file so that nobody ever sees half of it under its name.

The bytes go to a new file beside the target (0600), which is renamed when it is complete. `durable` also forces them
to the disk first, so that the file is complete after a power failure too. A process that is killed leaves at most a
temporary file, `.NAME.*.part`, which `sweep` removes.
Non-goals: what the bytes mean; two writers of one name (the last one wins, whole).
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

Piece = bytes | memoryview

PART = ".part"
ABANDONED = 3600.0  # seconds after its last write; then nobody is writing it any more


def write_whole(path: Path, pieces: Iterable[Piece], durable: bool = True, folder: int | None = None) -> int:
    """The number of bytes. Raises OSError, and then nothing has changed. The folder must exist; `folder` is a
    descriptor that the path starts at."""
    draft = path.with_name(f".{path.name}.{token_hex(8)}{PART}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        try:
            total = sum(_write_all(descriptor, piece) for piece in pieces)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
    if durable:
        sync_folder(path.parent, folder)
    return total


def sync_folder(path: Path, folder: int | None = None) -> None:
    """Make renames in the folder durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(".") and entry.name.endswith(PART):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                        os.unlink(entry.path)


def _write_all(descriptor: int, piece: Piece) -> int:
    left = memoryview(piece).cast("B")
    total = len(left)
    while left:
        left = left[os.write(descriptor, left) :]
    return total
