"""The meaning of the bytes of each codec.

    define    the codec in simple NumPy code; tests compare `encode` with it
    encode    the native routine that the writes of the host backends use
    decode    cells and scales to the vectors that they stand for, in f32

The bits of a cell are part of the contract, so only `encode` makes them. A codec with scales has one
f32 per row.
"""

from typing import NamedTuple, Protocol

import numpy as np

from kvarn import native
from kvarn.arrays import Cells, Floats
from kvarn.cache.spec import align

BLOCK = 32  # numbers that are rotated together


class Encoded(NamedTuple):
    cells: Cells  # [rows, units]
    scales: Floats | None  # [rows]


class Definition(Protocol):
    def define(self, x: Floats) -> Encoded: ...

    def encode(self, x: Floats) -> Encoded: ...

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        """Cells [..., units] and scales [...] to [..., dim]."""


class F32:
    def define(self, x: Floats) -> Encoded:
        return Encoded(x, None)

    encode = define

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        return encoded.cells


class F16:
    """Rounded half to even; 65,520 and above is infinity."""

    def define(self, x: Floats) -> Encoded:
        with np.errstate(over="ignore"):
            return Encoded(x.astype(np.float16), None)

    def encode(self, x: Floats) -> Encoded:
        cells = np.empty(x.shape, np.uint16)
        native.encode_f16(x, cells)
        return Encoded(cells.view(np.float16), None)

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        return encoded.cells.astype(np.float32)


class BF16:
    """The upper half of an f32, rounded half to even. NumPy has no bf16, so a cell is a uint16."""

    def define(self, x: Floats) -> Encoded:
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return Encoded(np.where(np.isnan(x), quiet, rounded).astype(np.uint16), None)

    def encode(self, x: Floats) -> Encoded:
        cells = np.empty(x.shape, np.uint16)
        native.encode_bf16(x, cells)
        return Encoded(cells, None)

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        return (encoded.cells.astype(np.uint32) << 16).view(np.float32)


def rotate(x: Floats) -> Floats:
    """R: the Hadamard matrix of 32 on each 32 numbers of the last axis, not normalized: R(R(x)) = 32 x.

    f32 additions in this order, so the bits are the same everywhere."""
    y = np.ascontiguousarray(x).reshape(-1, BLOCK)
    for h in (1, 2, 4, 8, 16):
        pairs = y.reshape(-1, BLOCK // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack((a + b, a - b), 2).reshape(-1, BLOCK)
    return y.reshape(x.shape)


class Int8:
    """The rotated row in 8 bits. Rotation spreads a large number over its block, so that the others lose less.

    scale = amax / 127 in f32, one per row. Codes are rounded half to even. A zero vector has scale 0. A vector that
    contains an infinity or a NaN has scale NaN, so that all of it decodes to NaN. Rows are padded with zeros to whole
    blocks of 32. A unit is a word of four codes."""

    def define(self, x: Floats) -> Encoded:
        dim = x.shape[1]
        y = rotate(np.pad(x, ((0, 0), (0, -dim % BLOCK))))
        amax = np.abs(y).max(-1)
        scales = np.where(np.isfinite(amax), amax / np.float32(127), np.float32(np.nan)).astype(np.float32)
        usable = (scales > 0)[:, None]
        ratio = np.divide(y, scales[:, None], out=np.zeros_like(y), where=usable)
        return Encoded(np.rint(np.clip(ratio, -127, 127)).astype(np.int8).view("<u4"), scales)

    def encode(self, x: Floats) -> Encoded:
        rows, dim = x.shape
        cells, scales = np.empty((rows, align(dim, BLOCK)), np.int8), np.empty(rows, np.float32)
        native.encode_int8(x, cells, scales)
        return Encoded(cells.view("<u4"), scales)

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        assert encoded.scales is not None
        y = np.ascontiguousarray(encoded.cells).view(np.int8).astype(np.float32) * encoded.scales[..., None]
        return np.ascontiguousarray((rotate(y) * np.float32(1 / BLOCK))[..., :dim])


DEFINITIONS: dict[str, Definition] = {"f32": F32(), "f16": F16(), "bf16": BF16(), "int8": Int8()}
