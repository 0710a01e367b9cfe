"""The SHA-256 of a stream, computed while the stream is copied."""

import os
from hashlib import sha256
from typing import IO

from kvarn.loading.progress import Progress

_PIECE = 1 << 20


def copy(source: IO[bytes], out: IO[bytes] | None, what: str, total: int, progress: Progress) -> str:
    """The SHA-256 of all bytes, which also go to `out`."""
    digest, done = sha256(), 0
    while piece := source.read(_PIECE):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        done += len(piece)
        progress(what, done, total)
    if out is not None:
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()
