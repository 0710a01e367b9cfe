"""A file of named tensors with a digest for each of them and one over the header: a strict safetensors file.

    8 bytes     length of the header, little-endian
    header      JSON: `__metadata__` (texts), and for each tensor its type, shape and place
    tensors     without gaps, in the order of the header

Any program that reads safetensors reads these files. Reading them here is stricter, because they come from anywhere:
the header must be exactly the bytes that `write` would write, so a changed bit in it is seen; nothing is allocated
before its size was compared with the file; nothing is run. A fault raises BadSnapshot with one line.
Non-goals: what the tensors mean (snapshot.py).
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvarn.arrays import Bytes
from kvarn.errors import BadSnapshot, printable
from kvarn.lasting.whole_file import Piece, write_whole

MOST_HEADER = 1 << 20
SIZES = {"U8": 1, "I8": 1, "U16": 2, "BF16": 2, "F16": 2, "F32": 4, "U32": 4}
_PIECE = 8 << 20
_DIGEST = "0" * 64


class Tensor(NamedTuple):
    dtype: str  # a name of SIZES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


def write(
    path: Path, texts: Mapping[str, str], tensors: Mapping[str, tuple[Tensor, Bytes]], folder: int | None = None
) -> int:
    """The size of the file, which is complete or was never there. Raises OSError."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda each: sha256(each[1].data).hexdigest(), tensors.values())
        digests = dict(zip(tensors, found, strict=True))
    table = {name: tensor for name, (tensor, _) in tensors.items()}
    header = _encoded({**texts, "digests": json.dumps(digests)}, table)

    def pieces() -> Iterator[Piece]:
        yield len(header).to_bytes(8, "little") + header
        yield from (data.data for _, data in tensors.values())

    return write_whole(path, pieces(), folder=folder)


def _encoded(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """The header, with the digest of itself: taken with zeros in its place."""

    def with_digest(digest: str) -> bytes:
        found: dict[str, Any] = {"__metadata__": {**texts, "digest": digest}}
        at = 0
        for name, tensor in tensors.items():
            found[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
            at += tensor.nbytes
        raw = json.dumps(found, separators=(",", ":")).encode()
        return raw + b" " * (-len(raw) % 8)

    return with_digest(sha256(with_digest(_DIGEST)).hexdigest())


class Container:
    """An open file whose header was checked. `texts` has no digests."""

    def __init__(self, path: str | PathLike[str], follow: bool = True, folder: int | None = None) -> None:
        """`follow`: whether the last part of the path may be a link. `folder`: descriptor that the path starts at."""
        self.name = printable(str(path), 200)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        try:
            self._descriptor = os.open(path, flags, dir_fd=folder)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no file can have this name"
            raise BadSnapshot(f"{self.name} cannot be read: {reason}") from None
        try:
            facts = os.fstat(self._descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise BadSnapshot(f"{self.name} is not a file")
            self.size = facts.st_size
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor, whose digest was compared."""
        out = np.empty(self.tensors[name].nbytes, np.uint8)
        self._pread(out.data, self._offsets[name])
        self._compare(name, sha256(out.data).hexdigest())
        return out

    def read_all(self, names: list[str]) -> dict[str, Bytes]:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return dict(zip(names, pool.map(self.read, names), strict=True))

    def check(self, name: str) -> None:
        """Compare a tensor's digest, with little memory."""
        found, at, end = sha256(), self._offsets[name], self._offsets[name] + self.tensors[name].nbytes
        while at < end:
            piece = bytearray(min(_PIECE, end - at))
            self._pread(memoryview(piece), at)
            found.update(piece)
            at += len(piece)
        self._compare(name, found.hexdigest())

    def _compare(self, name: str, digest: str) -> None:
        if self._digests[name] != digest:
            raise BadSnapshot(f"{self.name} is damaged: the digest of {name} is another; make it again")

    # -- the header ------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        start = bytearray(8)
        if self.size < 16:
            raise self._foreign("it has less than 16 bytes")
        self._pread(memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if not 2 <= length <= min(MOST_HEADER, self.size - 8):
            raise self._foreign("its first 8 bytes are not the length of a header")
        raw = bytearray(length)
        self._pread(memoryview(raw), 8)
        try:
            header = json.loads(bytes(raw))
            texts, tensors = self._parsed(header)
            if "digest" not in texts or "digests" not in texts:
                raise self._foreign("its metadata has no digests")
            del texts["digest"]
            if _encoded(texts, tensors) != raw:  # with the digest that these facts have
                raise BadSnapshot(f"{self.name} is damaged: its header has another digest; make it again")
            self._digests = json.loads(texts.pop("digests"))
            if not isinstance(self._digests, dict) or self._digests.keys() != tensors.keys():
                raise self._foreign("a tensor has no digest")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._foreign("its header is not that of a snapshot") from None
        self.texts, self.tensors = texts, tensors
        self._offsets, at = {}, 8 + length
        for name, tensor in tensors.items():
            self._offsets[name] = at
            at += tensor.nbytes
        if at != self.size:
            raise BadSnapshot(
                f"{self.name} is cut short or too long: it has {self.size:,} bytes and its header speaks of {at:,}"
            )

    def _parsed(self, header: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
        texts = header.pop("__metadata__")
        if not all(isinstance(each, str) for each in texts.values()):
            raise self._foreign("its metadata is not text")
        return texts, {name: self._tensor(entry) for name, entry in header.items()}

    def _tensor(self, entry: Any) -> Tensor:
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype not in SIZES or len(shape) > 4 or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
            raise self._foreign("it has a tensor of an unknown type or shape")
        return Tensor(dtype, tuple(shape))

    def _foreign(self, why: str) -> BadSnapshot:
        return BadSnapshot(f"{self.name} is no snapshot of kvarn: {why}")

    def _pread(self, out: memoryview, at: int) -> None:
        try:
            while out:
                n = os.preadv(self._descriptor, [out], at)
                if not n:
                    raise BadSnapshot(f"{self.name} has become shorter while it was read")
                out, at = out[n:], at + n
        except OSError as error:
            raise BadSnapshot(f"{self.name} cannot be read: {error.strerror or error}") from None
