"""GGUF files, version 2 and 3, little endian: metadata as Python values, tensors as bytes.

    magic "GGUF" | version u32 | n_tensors u64 | n_keys u64
    n_keys    x  ( key string | value type u32 | value )               string: length u64, bytes
    n_tensors x  ( name string | n_dims u32 | dims u64.. | type u32 | offset u64 )
    padding to the alignment | tensor data, each at its offset

A file is not trusted. Before memory is allocated for a count, the count is compared with the bytes that
are left in the file. So the memory stays in proportion to the file. Every fault raises `BadModel` with a
one-line message. Arrays of numbers become NumPy arrays; arrays of strings and of arrays become lists.
Text must be valid UTF-8: vocabularies write raw bytes as "<0xFF>" or with other characters, so invalid
UTF-8 means a damaged file.
Non-goals: writing; version 1; big endian.
"""

from math import prod
from os import PathLike
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from kvarn.arrays import Bytes
from kvarn.errors import BadModel
from kvarn.loading.encodings import BY_ID, TensorInfo
from kvarn.loading.file_bytes import ByteSource, FileBytes, on_disk

_U32, _U64 = Struct("<I"), Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# value type: (how struct reads it, how NumPy does)
_NUMBERS = {
    0: (Struct("<B"), "<u1"),
    1: (Struct("<b"), "<i1"),
    2: (Struct("<H"), "<u2"),
    3: (Struct("<h"), "<i2"),
    4: (Struct("<I"), "<u4"),
    5: (Struct("<i"), "<i4"),
    6: (Struct("<f"), "<f4"),
    10: (Struct("<Q"), "<u8"),
    11: (Struct("<q"), "<i8"),
    12: (Struct("<d"), "<f8"),
}
_SMALLEST = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {kind: number.size for kind, (number, _) in _NUMBERS.items()}
_MAX_DEPTH = 4  # arrays in arrays; no model in use has any
_MAX_NAME = 65535  # bytes of a key or of a tensor's name
_MAX_DIMS = 4
_FIRST_READ = 1 << 20  # bytes of the header; it doubles
_ALIGNMENT = 32  # unless the file says otherwise


class _Damage(Exception):
    """What is wrong, without the file's name, and what to do."""

    def __init__(self, what: str, remedy: str = "fetch the file again") -> None:
        super().__init__(what)
        self.remedy = remedy


class _Header:
    """A cursor over the file; each method reads one thing and moves on."""

    def __init__(self, file: ByteSource) -> None:
        self.buffer = b""  # the beginning of the file, as far as it was needed
        self.size = file.size
        self.pos = 0
        self._file = file

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.pos:
            left = self.size - self.pos
            raise _Damage(f"is cut short or damaged: {what} needs {n_bytes} bytes at {self.pos} and {left} are left")
        self.load(self.pos + n_bytes)

    def load(self, end: int) -> bytes:
        """The buffer, with all bytes before `end` that the file has."""
        have = len(self.buffer)
        if end > have:
            self.buffer += self._file.read(have, min(max(end, 2 * have, _FIRST_READ), self.size)).tobytes()
        return self.buffer

    def number(self, form: Struct, what: str) -> Any:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.buffer, self.pos)
        self.pos += form.size
        return value

    def string(self, what: str, longest: int | None = None) -> str:
        length = self.number(_U64, what)
        if longest is not None and length > longest:
            raise _Damage(f"is damaged: {what} is {length} bytes long, more than {longest}")
        self.need(length, what)
        start, self.pos = self.pos, self.pos + length
        try:
            return str(self.buffer[start : self.pos], "utf-8")
        except UnicodeDecodeError as e:
            raise _Damage(f"is damaged: {what} is not UTF-8 text ({e.reason} at byte {start + e.start})") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind][0], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _BOOL:
            return bool(self.bools(1, key)[0])
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        raise _Damage(f"is damaged: the value of {key} has the unknown type {kind}")

    def bools(self, count: int, key: str) -> Any:
        self.need(count, key)
        values = np.frombuffer(self.buffer, "<u1", count, self.pos)
        if count and values.max() > 1:
            raise _Damage(f"is damaged: {key} holds a truth value that is neither 0 nor 1")
        self.pos += count
        return values.astype(np.bool_)

    def array(self, key: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _Damage(f"is damaged: {key} nests arrays deeper than {_MAX_DEPTH}")
        kind, count = self.number(_U32, key), self.number(_U64, key)
        if kind not in _SMALLEST:
            raise _Damage(f"is damaged: the array {key} has the unknown type {kind}")
        self.need(count * _SMALLEST[kind], f"{key} of {count} elements")
        if kind in _NUMBERS:
            form = _NUMBERS[kind][1]
            # A copy, since the file does not align it; a few megabytes for the largest vocabulary.
            values = np.frombuffer(self.buffer, form, count, self.pos).astype(form[1:])
            self.pos += values.nbytes
            return values
        if kind == _BOOL:
            return self.bools(count, key)
        if kind == _ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.strings(count, key)

    def strings(self, count: int, key: str) -> list[str]:
        """The vocabulary, hundreds of thousands of strings: one loop without calls to our own methods."""
        buffer, pos, length_at, found = self.buffer, self.pos, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = pos + 8
                if start > len(buffer) and start > len(buffer := self.load(start)):
                    break
                pos = start + length_at(buffer, pos)[0]
                if pos > len(buffer) and (pos > self.size or pos > len(buffer := self.load(pos))):
                    break
                found.append(str(buffer[start:pos], "utf-8"))
        except UnicodeDecodeError as e:
            raise _Damage(f"is damaged: element {len(found)} of {key} is not UTF-8 text ({e.reason})") from None
        if len(found) < count:
            raise _Damage(f"is cut short or damaged: element {len(found)} of {key} ends past the end of the file")
        self.pos = pos
        return found

    def tensor(self) -> TensorInfo:
        """Its place is still counted from the start of the data."""
        name = self.string("a tensor's name", _MAX_NAME)
        n_dims = self.number(_U32, name)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise _Damage(f"is damaged: tensor {name} has {n_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = [self.number(_U64, name) for _ in range(n_dims)]  # fastest first
        kind, offset = self.number(_U32, name), self.number(_U64, name)
        encoding = BY_ID.get(kind)
        if encoding is None:
            raise _Damage(f"has the tensor {name} of unknown type {kind}", "update kvarn, or fetch the file again")
        if 0 in dims:
            raise _Damage(f"is damaged: tensor {name} is empty, {dims}")
        if dims[0] % encoding.block_size:
            blocks = f"blocks of {encoding.block_size} ({encoding.name})"
            raise _Damage(f"is damaged: tensor {name} has rows of {dims[0]} numbers, which are no whole {blocks}")
        nbytes = encoding.row_bytes(dims[0]) * prod(dims[1:])
        return TensorInfo(name, encoding.name, tuple(reversed(dims)), offset, nbytes)


class GGUFFile:
    """`metadata` by key, `tensors` by name, and `raw(name)`, the bytes of a tensor."""

    def __init__(self, path: Path, file: ByteSource, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._file = file

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "GGUFFile":
        path = Path(path)
        try:
            file = FileBytes(path)
        except OSError as e:
            raise BadModel(f"{path} cannot be read: {e.strerror or e}; check the path and its permissions") from None
        return cls.of(path, file)

    @classmethod
    def of(cls, path: Path, file: ByteSource) -> "GGUFFile":
        """Reads the header. `path` is for messages."""
        try:
            if file.size == 0:
                raise _Damage("is empty")
            header = _Header(file)
            n_tensors, n_keys = _counts(header)
            metadata = _metadata(header, n_keys)
            return cls(path, file, metadata, _tensors(header, n_tensors, _alignment(metadata)))
        except _Damage as e:
            raise BadModel(f"{path} {e}; {e.remedy}") from None

    def raw(self, name: str) -> Bytes:
        info = self.tensors.get(name)
        if info is None:
            raise BadModel(f"{self.path} has no tensor {name}; ask for one of `tensors`")
        return self._file.read(info.offset, info.offset + info.nbytes)

    def file(self, name: str) -> FileBytes:
        """The file that has the tensor, at its offset."""
        return on_disk(self.path, self._file)


def general_keys(path: str | PathLike[str]) -> dict[str, Any]:
    """The keys `general.*` at the beginning of a file. Much faster than `open`: vocabularies come later."""
    try:
        header = _Header(FileBytes(Path(path)))
        _, n_keys = _counts(header)
        found: dict[str, Any] = {}
        for _ in range(n_keys):
            key = header.string("a key", _MAX_NAME)
            if not key.startswith("general."):
                break
            found[key] = header.value(header.number(_U32, key), key)
        return found
    except _Damage as e:
        raise BadModel(f"{path} {e}; {e.remedy}") from None
    except OSError as e:
        raise BadModel(f"{path} cannot be read: {e.strerror or e}; check the path and its permissions") from None


def _counts(header: _Header) -> tuple[int, int]:
    magic = header.load(4)[:4]
    if magic != b"GGUF":
        raise _Damage(f"is not a GGUF file: it begins with {magic!r}", "give a .gguf file or a folder with config.json")
    header.pos = 4
    version = header.number(_U32, "the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise _Damage("is a big-endian GGUF file, which kvarn does not read", "convert it to little endian")
        raise _Damage(f"is GGUF version {version}, and kvarn reads 2 and 3", "convert the model again")
    n_tensors, n_keys = header.number(_U64, "the number of tensors"), header.number(_U64, "the number of keys")
    header.need(n_tensors * 32 + n_keys * 13, f"a header of {n_keys} keys and {n_tensors} tensors")  # at the least
    return n_tensors, n_keys


def _metadata(header: _Header, n_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = header.string("a key", _MAX_NAME)
        if key in metadata:
            raise _Damage(f"is damaged: the key {key} occurs twice")
        metadata[key] = header.value(header.number(_U32, key), key)
    return metadata


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise _Damage(f"is damaged: general.alignment is {alignment!r}, not a power of two from 8")
    return alignment


def _tensors(header: _Header, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = header.tensor()
        if info.name in found:
            raise _Damage(f"is damaged: the tensor {info.name} occurs twice")
        found[info.name] = info
    data = -(-header.pos // alignment) * alignment
    end, before = 0, ""
    for info in sorted(found.values(), key=lambda info: info.offset):
        if info.offset % alignment:
            raise _Damage(f"is damaged: tensor {info.name} lies at {info.offset}, no multiple of {alignment}")
        if info.offset < end:
            raise _Damage(f"is damaged: the tensors {before} and {info.name} overlap")
        end, before = info.offset + info.nbytes, info.name
        if data + end > header.size:
            raise _Damage(f"is cut short: tensor {before} ends at {data + end} and the file at {header.size}")
        found[info.name] = TensorInfo(info.name, info.type, info.shape, data + info.offset, info.nbytes)
    return found
