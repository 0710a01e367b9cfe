"""The meaning of the bytes of each codec.

    define    the codec in simple NumPy code; tests compare `encode` with it
    encode    the native routine that the writes of the host backends use
    decode    cells and scales to the vectors that they stand for, in f32

The bits of a cell are part of the contract, so only `encode` makes them. The cells of a codec with a tail
are made from int8 rows: `pack` is that part of `define`, and `made` that of `encode`.
"""

from typing import NamedTuple, Protocol

import numpy as np

from kvarn import native
from kvarn.arrays import Cells, Floats
from kvarn.cache.spec import align

BLOCK = 32  # numbers that are rotated together


class Encoded(NamedTuple):
    cells: Cells  # [rows, units]
    scales: Cells | None  # [rows] f32, or [rows, blocks of 32 numbers] u8


class Definition(Protocol):
    def define(self, x: Floats) -> Encoded: ...

    def encode(self, x: Floats) -> Encoded: ...

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        """Cells [..., units] and scales [...] or [..., blocks] to [..., dim]."""


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


SCALE_ZERO = 880  # a scale code c stands for the f32 with the bits (c + 880) << 20: 2^-17 times 1, 1.125, 1.25, ...
NO_SCALE, NAN_SCALE = 0, 255  # the codes of the scales 0 and NaN


def scale_of(code: Cells) -> Floats:
    bits = (code.astype(np.uint32) + np.uint32(SCALE_ZERO)) << np.uint32(20)
    special = np.where(code == NAN_SCALE, np.float32(np.nan), np.float32(0))
    return np.where((code == NO_SCALE) | (code == NAN_SCALE), special, bits.view(np.float32))


class Packed:
    """The rotated row in 4 or 6 bits, with one byte of scale for 32 numbers.

    Codes u are 0 to 2^bits - 1 and stand for (u - middle + 1/2) scale, so no level is 0 and no value is halfway
    between two. The scale is the smallest that clips nothing, or one of the two below it if its squared error is
    less. The numbers are those of the int8 row. A block of zeros has scale 0; a block that is not finite has scale
    NaN. Both have codes in the middle. Each sum and product is rounded on its own, so the bits are the same
    everywhere."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.middle = np.float32(1 << (bits - 1))
        self.reach = self.middle - np.float32(0.5)  # the largest level, in scales

    def define(self, x: Floats) -> Encoded:
        return self.pack(Int8().define(x))

    def encode(self, x: Floats) -> Encoded:
        return self.made(Int8().encode(x))

    def made(self, rows: Encoded) -> Encoded:
        """`pack`, by the native routine."""
        assert rows.scales is not None
        codes = np.ascontiguousarray(rows.cells).view(np.int8)
        flat, blocks = codes.reshape(-1, codes.shape[-1]), codes.shape[-1] // BLOCK
        cells, scales = np.empty((len(flat), blocks * self.bits), np.uint32), np.empty((len(flat), blocks), np.uint8)
        encode = native.encode_int4 if self.bits == 4 else native.encode_int6
        encode(flat, np.ascontiguousarray(rows.scales).reshape(-1), cells, scales)
        shape = codes.shape[:-1]
        return Encoded(cells.reshape(*shape, -1), scales.reshape(*shape, -1))

    def pack(self, rows: Encoded) -> Encoded:
        """Cells of int8 rows, [..., unit] and [...]."""
        assert rows.scales is not None
        codes = np.ascontiguousarray(rows.cells).view(np.int8).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            y = (codes * rows.scales[..., None]).reshape(*codes.shape[:-1], -1, BLOCK)
            u, scales = self._round(y)
        return Encoded(self._words(u), scales)

    def _round(self, y: Floats) -> tuple[Cells, Cells]:
        amax = np.abs(y).max(-1)
        finite = np.isfinite(amax)
        y = np.where(finite[..., None], y, np.float32(0))
        need = (np.where(finite, amax, np.float32(0)) / self.reach).view(np.uint32).astype(np.int64)
        top = np.clip(((need + 0xFFFFF) >> 20) - SCALE_ZERO, 1, 254)
        u, error = self._at(y, top)
        code = top
        for less in (1, 2):
            lower = np.maximum(top - less, 1)
            other, its_error = self._at(y, lower)
            better = its_error < error  # of equals, the larger scale
            u, error = np.where(better[..., None], other, u), np.where(better, its_error, error)
            code = np.where(better, lower, code)
        plain = finite & (amax > 0)
        code = np.where(plain, code, np.where(finite, NO_SCALE, NAN_SCALE))
        return np.where(plain[..., None], u, self.middle).astype(np.uint8), code.astype(np.uint8)

    def _at(self, y: Floats, code: Cells) -> tuple[Floats, Floats]:
        """Codes of numbers [..., 32] with the scales of these codes [...], and the squared error of each block."""
        scale = scale_of(code)[..., None]
        u = np.clip(np.floor(y / scale) + self.middle, np.float32(0), np.float32(2) * self.middle - np.float32(1))
        error = (u - self.reach) * scale - y
        error = error * error
        for half in (16, 8, 4, 2, 1):
            error = error[..., :half] + error[..., half:]
        return u, error[..., 0]

    def _words(self, u: Cells) -> Cells:
        """Byte i of a block's first 16 has the low four bits of numbers i and 16 + i. With 6 bits, byte i of the next
        8 has the high two bits of the numbers i, 8 + i, 16 + i and 24 + i."""
        low = u & 15
        parts = [low[..., :16] | low[..., 16:] << 4]
        if self.bits == 6:
            high = (u >> 4).reshape(*u.shape[:-1], 4, 8)
            parts.append(high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6)
        return np.ascontiguousarray(np.concatenate(parts, -1)).view("<u4").reshape(*u.shape[:-2], -1)

    def levels(self, cells: Cells) -> Cells:
        """2 u - 2^bits + 1, odd numbers [..., blocks, 32]: twice the values in scales."""
        shape = (*cells.shape[:-1], cells.shape[-1] // self.bits, 4 * self.bits)
        data = np.ascontiguousarray(cells).view(np.uint8).reshape(shape)
        u = np.concatenate((data[..., :16] & 15, data[..., :16] >> 4), -1)
        if self.bits == 6:
            u = u | np.concatenate([(data[..., 16:] >> shift & 3) << 4 for shift in (0, 2, 4, 6)], -1)
        return (2 * u.astype(np.int16) - (1 << self.bits) + 1).astype(np.int8)

    def decode(self, encoded: Encoded, dim: int) -> Floats:
        assert encoded.scales is not None
        y = self.levels(encoded.cells).astype(np.float32) * (scale_of(encoded.scales) * np.float32(0.5))[..., None]
        y = y.reshape(*y.shape[:-2], y.shape[-2] * BLOCK)
        return np.ascontiguousarray((rotate(y) * np.float32(1 / BLOCK))[..., :dim])


PACKED = {"int6": Packed(6), "int4": Packed(4)}  # the codecs with a tail
DEFINITIONS: dict[str, Definition] = {"f32": F32(), "f16": F16(), "bf16": BF16(), "int8": Int8(), **PACKED}
