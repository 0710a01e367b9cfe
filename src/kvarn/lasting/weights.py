"""The identity of a model's weights: SHA-256 over its tensors, taken once and remembered.

The digest covers the table of tensors (name, type, shape, as the model names them) and their stored bytes. Nothing
else of the file is in it, so a new chat template does not change it. It is taken when it is first asked for, through
the descriptors that the weights were loaded from.

A stamp in kvarn's folder remembers it for the same path, size, times and inode. A file that changed less than two
seconds ago gets no stamp, because a second change could have the same time. If the files have changed since the model
was loaded, there is no digest: nothing says what the loaded weights were.
"""

import json
import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvarn.errors import BadModel
from kvarn.lasting.whole_file import write_whole
from kvarn.loading.checkpoint import Checkpoint, InFile
from kvarn.loading.paths import cache_folder
from kvarn.loading.progress import Progress, quiet

_PIECE = 4 << 20
_MOST_BYTES = 1 << 20
_MOST_STAMPS = 100
_SETTLED = 2 * 10**9  # nanoseconds


class _Facts(NamedTuple):
    """What changes when a file changes. The time of the inode cannot be set back."""

    size: int
    modified: int
    changed: int
    inode: int
    device: int


class Weights:
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Made before the weights are loaded, so that a change during the loading is seen."""
        self._path = checkpoint.path
        self._tensors = sorted(map(checkpoint.place, checkpoint.shapes), key=lambda each: each.info.name)
        self._loaded = self._facts()
        self._digest = ""

    def digest(self, progress: Progress = quiet) -> str:
        """64 hexadecimal digits. Raises BadModel if the files have changed since they were opened."""
        self._check()
        if not self._digest:
            stamp = self._stamp()
            known = self._read(stamp)
            self._digest = known or self._compute(progress)
            if not known:
                self._check()
                self._write(stamp)
        return self._digest

    def _check(self) -> None:
        if self._facts() != self._loaded:
            raise BadModel(f"{self._path} has changed since it was loaded: start again")

    def _facts(self) -> list[_Facts]:
        files = {id(each.file): each.file for each in self._tensors}
        return sorted(map(_facts, (file.fileno() for file in files.values())))

    def _compute(self, progress: Progress) -> str:
        whole, done = sha256(), 0
        total = sum(each.info.nbytes for each in self._tensors)
        buffer = np.empty(_PIECE, np.uint8)
        for tensor in self._tensors:
            whole.update(_row(tensor))
            info = tensor.info
            for start in range(0, info.nbytes, _PIECE):
                piece = buffer[: min(_PIECE, info.nbytes - start)]
                tensor.file.read_into(info.offset + start, piece)
                whole.update(piece.data)
                done += len(piece)
                progress("identifying the model", done, total)
        return whole.hexdigest()

    # -- the stamp -------------------------------------------------------------------------------------------------

    def _stamp(self) -> Path:
        name = sha256(os.path.abspath(self._path).encode("utf-8", "surrogateescape"))
        for tensor in self._tensors:
            name.update(_row(tensor) + b"%d\n" % tensor.info.offset)
        return cache_folder() / "weights" / name.hexdigest()

    def _read(self, stamp: Path) -> str:
        """Empty if there is no stamp of these files."""
        try:
            if stamp.stat().st_size > _MOST_BYTES:
                return ""
            found = json.loads(stamp.read_bytes())
            same = found["files"] == [list(each) for each in self._loaded]
            if same:
                os.utime(stamp)  # `_prune` keeps those that are used
            return str(found["digest"]) if same else ""
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return ""

    def _write(self, stamp: Path) -> None:
        newest = max(max(each.modified, each.changed) for each in self._loaded)
        if time.time_ns() - newest < _SETTLED:
            return
        with suppress(OSError):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"digest": self._digest, "files": self._loaded})
            write_whole(stamp, [text.encode()], durable=False)
            _prune(stamp.parent)


def _prune(folder: Path) -> None:
    """Models come and go: keep the stamps that were used last."""
    stamps = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    for stamp in stamps[:-_MOST_STAMPS]:
        stamp.unlink(missing_ok=True)


def _facts(descriptor: int) -> _Facts:
    found = os.fstat(descriptor)
    return _Facts(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def _row(tensor: InFile) -> bytes:
    info = tensor.info
    return f"{info.name} {info.type} {info.shape}\n".encode()
