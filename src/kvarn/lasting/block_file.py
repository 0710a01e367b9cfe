"""The file of one block: a header, the tokens, the cells. Everything in it is checked before it is believed.

    0   8   magic
    8   4   format
    12  4   number of tokens, n
    16  8   bytes of cells
    24  16  the chained hash that names the block
    40  16  namespace: what decides the bits of cells
    56  16  BLAKE2b of the tokens
    72  16  BLAKE2b of the cells
    88  16  BLAKE2b of the header up to here
    104     tokens, 8 bytes each; then cells as `Memory.read_block` gives them

Integers are little-endian. A file that was cut, or has one wrong bit anywhere, raises Damaged.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

MAGIC = b"kvarnkvb"
FORMAT = 1
_FIELDS = struct.Struct("<8sIIQ16s16s16s16s")
HEADER = _FIELDS.size + 16


class Damaged(Exception):
    """The file does not hold what its name promises."""


class Name(NamedTuple):
    """One block of a namespace."""

    group: int
    key: bytes


def digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=16).digest()


def head_of(namespace: bytes, key: bytes, tokens: Sequence[int], cells: bytes) -> bytes:
    """Everything before the cells."""
    words = struct.pack(f"<{len(tokens)}q", *tokens)
    fields = (MAGIC, FORMAT, len(tokens), len(cells), key, namespace, digest(words), digest(cells))
    header = _FIELDS.pack(*fields)
    return header + digest(header) + words


def cells_of(data: bytes, namespace: bytes, key: bytes, tokens: Sequence[int]) -> bytes:
    """The cells of a file, if it holds the block that is asked for."""
    if len(data) < HEADER:
        raise Damaged("the file is shorter than its header")
    header, check = data[: _FIELDS.size], data[_FIELDS.size : HEADER]
    magic, form, n_tokens, n_cells, own_key, own_space, of_words, of_cells = _FIELDS.unpack(header)
    if magic != MAGIC or form != FORMAT or check != digest(header):
        raise Damaged("the header is not one of this format")
    if (own_key, own_space) != (key, namespace):
        raise Damaged("the file holds another block")
    at = HEADER + 8 * n_tokens
    if len(data) != at + n_cells:
        raise Damaged("the file has another length than its header says")
    words, cells = data[HEADER:at], memoryview(data)[at:]
    if digest(words) != of_words or words != struct.pack(f"<{len(tokens)}q", *tokens):
        raise Damaged("the file holds other tokens")
    if digest(cells) != of_cells:
        raise Damaged("the cells have changed")
    return bytes(cells)
