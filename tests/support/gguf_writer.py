"""A writer of small GGUF files for tests, kept apart from the reader: it also writes files that are wrong."""

import struct
from dataclasses import dataclass

import numpy as np

KINDS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i")}
KINDS |= {"f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}
STRING, ARRAY = 8, 9
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "BF16": 30}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content) -> bytes:
    """`kind` is a number's, "str", or "[" and the kind of the elements."""
    if kind.startswith("["):
        inner = [value(kind[1:], x)[4:] for x in content]
        return struct.pack("<IIQ", ARRAY, kind_id(kind[1:]), len(inner)) + b"".join(inner)
    if kind == "str":
        return struct.pack("<I", STRING) + string(content)
    number, form = KINDS[kind]
    return struct.pack("<I" + form, number, content)


def kind_id(kind: str) -> int:
    return ARRAY if kind.startswith("[") else STRING if kind == "str" else KINDS[kind][0]


@dataclass
class Tensor:
    name: str
    data: bytes
    dims: tuple[int, ...]  # fastest first, as in the file
    type_id: int = 0
    offset: int | None = None  # None: after the one before it

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> "Tensor":
        array = np.ascontiguousarray(array, dtype="<f4")
        return cls(name, array.tobytes(), tuple(reversed(array.shape)))


def entry(tensor: Tensor, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
    return string(tensor.name) + dims + struct.pack("<IQ", tensor.type_id, offset)


def gguf(keys=(), tensors=(), *, version=3, alignment=32, magic=b"GGUF", n_keys=None, n_tensors=None) -> bytes:
    """`keys` are (name, kind, content), or bytes to be taken as they are."""
    keys, tensors = list(keys), list(tensors)
    head = magic + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    head += b"".join(k if isinstance(k, bytes) else string(k[0]) + value(k[1], k[2]) for k in keys)
    data = bytearray()
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        head += entry(tensor, len(data) if tensor.offset is None else tensor.offset)
        data += tensor.data
    return head + bytes(-len(head) % alignment) + bytes(data)
