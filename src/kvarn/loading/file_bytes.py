"""Parts of a file, with errors in one line.

The file is read, not mapped: if a mapped file becomes shorter, or its disk fails, the next access ends
the process. Reading raises an error instead.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from kvarn.arrays import Bytes
from kvarn.errors import BadModel


class ByteSource(Protocol):
    """Enough for the header of a file: a file of this machine, or one on the hub (hub_headers.py)."""

    size: int

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from `start` to before `stop`, which must be inside the file."""


class FileBytes:
    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        return self._descriptor

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from `start` to before `stop`, which must be inside the file."""
        found = np.empty(stop - start, np.uint8)
        self.read_into(start, found)
        found.flags.writeable = False
        return found

    def read_into(self, start: int, out: Bytes) -> None:
        """The bytes from `start` on, which must be inside the file, as many as `out` has."""
        left = out.reshape(-1).data
        stop = start + len(left)
        with self.reading():
            while left:
                n = os.preadv(self.fileno(), [left], stop - len(left))
                if not n:
                    raise EOFError
                left = left[n:]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Errors of reading the file become `BadModel`."""
        try:
            yield
        except OSError as e:
            raise BadModel(f"{self._path} cannot be read: {e.strerror or e}; check its disk") from None
        except EOFError:
            raise BadModel(f"{self._path} has become shorter while it was read; fetch it again") from None


def on_disk(path: Path, file: ByteSource) -> FileBytes:
    """The file, if its weights can be read, too."""
    if not isinstance(file, FileBytes):
        raise BadModel(f"only the header of {path} was read; pull the model to use its weights")
    return file
