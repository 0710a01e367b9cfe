"""Snapshots by name, in one folder, for several owners who cannot see each other's.

    DIR/OWNER/NAME.kvs      folders 0700, files 0600

A name is never a path: [A-Za-z0-9._-], at most 64 characters. Folders and files are opened relative to the folder and
without following links, so a link in it leads nowhere. All files together have at most `most` bytes.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting.snapshot import SUFFIX, Facts, SnapshotFile
from kvarn.lasting.whole_file import sweep
from kvarn.words import file_size

_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NOBODY = "all"  # the owner where there are no keys


class NoSnapshot(KvarnError):
    """There is no snapshot of this name, or it belongs to somebody else."""


class Named(NamedTuple):
    name: str
    facts: Facts | None  # None: it cannot be read
    problem: str = ""


class Collection:
    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self._most = folder, most
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder, _FOLDER)
        except OSError as error:
            raise KvarnError(f"--snapshot-dir {folder}: {error.strerror or error}") from None
        if os.fstat(self._descriptor).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KvarnError(f"--snapshot-dir {folder}: other users may write there; chmod 700 {folder}")
        for each in folder.iterdir():
            sweep(each)

    def check_room(self, nbytes: int) -> None:
        """Raise KvarnError if a snapshot of this size would be too much."""
        used = sum(each.stat().st_size for each in self.folder.glob(f"*/*{SUFFIX}"))
        if used + nbytes > self._most:
            raise KvarnError(
                f"the snapshots of this server would take {file_size(used + nbytes)} and may take "
                f"{file_size(self._most)}: delete some"
            )

    @contextmanager
    def place(self, owner: bytes, name: str) -> Iterator[tuple[int, Path]]:
        """The folder (a descriptor) and the file name for a snapshot that is to be written."""
        file = _file(name)
        with self._owned(owner, make=True) as folder:
            yield folder, Path(file)

    @contextmanager
    def open(self, owner: bytes, name: str) -> Iterator[SnapshotFile]:
        file = _file(name)
        with self._owned(owner) as folder:
            if not _is_file(file, folder):
                raise NoSnapshot(f"there is no snapshot {name}")
            with SnapshotFile(file, follow=False, folder=folder) as found:
                yield found

    def remove(self, owner: bytes, name: str) -> None:
        file = _file(name)
        with self._owned(owner) as folder:
            try:
                os.unlink(file, dir_fd=folder)
            except FileNotFoundError:
                raise NoSnapshot(f"there is no snapshot {name}") from None
            except OSError as error:
                raise KvarnError(f"{name} cannot be deleted: {error.strerror or error}") from None

    def list(self, owner: bytes) -> list[Named]:
        """By name."""
        found = []
        with suppress(NoSnapshot), self._owned(owner) as folder:
            for file in sorted(os.listdir(folder)):
                if file.endswith(SUFFIX) and _NAME.fullmatch(file.removesuffix(SUFFIX)) and _is_file(file, folder):
                    found.append(self._named(file, folder))
        return found

    @staticmethod
    def _named(file: str, folder: int) -> Named:
        name = file.removesuffix(SUFFIX)
        try:
            with SnapshotFile(file, follow=False, folder=folder) as opened:
                return Named(name, opened.facts)
        except BadSnapshot as error:
            return Named(name, None, str(error))

    @contextmanager
    def _owned(self, owner: bytes, make: bool = False) -> Iterator[int]:
        name = owner.hex() or NOBODY
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._descriptor)
            descriptor = os.open(name, _FOLDER, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise NoSnapshot("there is no snapshot of this name") from None
        except OSError as error:
            raise KvarnError(f"the folder of snapshots cannot be used: {error.strerror or error}") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _file(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise KvarnError("the name of a snapshot has letters, digits and . _ - and at most 64 of them")
    return name.removesuffix(SUFFIX) + SUFFIX


def _is_file(file: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(file, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
