"""The meaning of the bytes of each codec.

    define    the codec in simple NumPy code; tests compare `encode` with it
    encode    the native routine that the writes of the host backends use
    widen     cells to f32, exactly

The bits of a cell are part of the contract, so only `encode` makes them. A codec with scales has one
f32 per row, and the value of a cell is widen(cell) * scale.
"""

from typing import NamedTuple, Protocol

import numpy as np

from kvarn import native
from kvarn.arrays import Cells, Floats


class Encoded(NamedTuple):
    cells: Cells  # [rows, dim]
    scales: Floats | None  # [rows]


class Definition(Protocol):
    def define(self, x: Floats) -> Encoded: ...

    def encode(self, x: Floats) -> Encoded: ...

    def widen(self, cells: Cells) -> Floats: ...


class F32:
    def define(self, x: Floats) -> Encoded:
        return Encoded(x, None)

    encode = define

    def widen(self, cells: Cells) -> Floats:
        return cells


class F16:
    """Rounded half to even; 65,520 and above is infinity."""

    def define(self, x: Floats) -> Encoded:
        with np.errstate(over="ignore"):
            return Encoded(x.astype(np.float16), None)

    def encode(self, x: Floats) -> Encoded:
        cells = np.empty(x.shape, np.uint16)
        native.encode_f16(x, cells)
        return Encoded(cells.view(np.float16), None)

    def widen(self, cells: Cells) -> Floats:
        return cells.astype(np.float32)


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

    def widen(self, cells: Cells) -> Floats:
        return (cells.astype(np.uint32) << 16).view(np.float32)


class Int8:
    """scale = amax / 127 in f32, one per row. Cells are rounded half to even. A zero vector has scale 0.

    A vector that contains an infinity or a NaN has scale NaN, so that all of it decodes to NaN."""

    def define(self, x: Floats) -> Encoded:
        amax = np.abs(x).max(-1)
        scales = np.where(np.isfinite(amax), amax / np.float32(127), np.float32(np.nan)).astype(np.float32)
        usable = (scales > 0)[:, None]
        ratio = np.divide(x, scales[:, None], out=np.zeros_like(x), where=usable)
        return Encoded(np.rint(np.clip(ratio, -127, 127)).astype(np.int8), scales)

    def encode(self, x: Floats) -> Encoded:
        cells, scales = np.empty(x.shape, np.int8), np.empty(x.shape[0], np.float32)
        native.encode_int8(x, cells, scales)
        return Encoded(cells, scales)

    def widen(self, cells: Cells) -> Floats:
        return cells.astype(np.float32)


DEFINITIONS: dict[str, Definition] = {"f32": F32(), "f16": F16(), "bf16": BF16(), "int8": Int8()}
