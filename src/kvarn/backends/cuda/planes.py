"""Packed matrices: which stored types, where their bits lie on a device, and which f16 numbers they are.

A row is cut into blocks that have a scale, and a unit is a few blocks. A matrix is two arrays:

    codes    u16 [rows / 16, units, tiles, 16, span]   element j of a tile has column j of several blocks
    headers  u32 [units, words, rows]                  two f16: scale and offset of a block, or two scales

    bits  span  a unit                     a tile                                     bits per weight
    4      32   4 blocks, 128 columns      4 codes of 4 bits                          4.5, with offsets 5.0
    5      32   3 blocks,  96 columns      3 codes of 5 bits                          6.3, with offsets
    6      16   8 blocks, 128 columns      4 codes of 4 bits; in the third, 8 of 2    7.0
    8      32   4 blocks, 128 columns      2 codes of 8 bits                          8.5

Why so: an element has as many columns as it holds codes, so 5 bits do not fit 16 without a remainder, and
a plane of single bits would need units of 512 columns. Q6_K has a scale for 16 columns. As codes of 8 bits
it would take 9.0 bits per weight. Q5_0 is stored with offsets, because it is rare and a kernel is not.

A weight is fma(scale', code * 2^-(14 + bits), offset) in f16, rounded once (kernels/unpack.py). All scales
and offsets of a matrix are multiplied by one power of two, so that the largest is near the largest f16;
the product divides by it. So the weights are about as exact as f16 allows, whatever their size.

native/planes.cpp packs blocks of a file. `peak` comes first: the largest scale of all matrices of a
product decides about the power of two that they are multiplied by.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarn import native
from kvarn.arrays import Bytes
from kvarn.cache.spec import ceil_div

GROUP = 16  # rows whose tiles lie together
LARGEST = 15  # scales and offsets are at most 2 to the power of this, half of the largest f16


@dataclass(frozen=True, slots=True)
class Planes:
    bits: int
    offsets: bool  # every block has one; otherwise the code in the middle is zero
    blocks: int  # of a unit
    span: int = 32  # columns of a block

    @property
    def name(self) -> str:
        """Of matrices that can be one product: `packed4+`."""
        return f"packed{self.bits}{'+' if self.offsets else ''}"

    @property
    def field(self) -> int:
        """Bits of a code in its own tile. Those above it are in one more tile."""
        return 4 if self.bits == 6 else self.bits

    @property
    def each(self) -> int:
        """Codes in an element."""
        return 16 // self.field

    @property
    def upper(self) -> bool:
        return self.field < self.bits

    @property
    def tiles(self) -> int:
        return ceil_div(self.blocks, self.each) + self.upper

    @property
    def words(self) -> int:
        return self.blocks if self.offsets else self.blocks // 2

    @property
    def unit(self) -> int:
        """Columns."""
        return self.blocks * self.span

    @property
    def unit_bytes(self) -> int:
        """Of one row."""
        return 2 * self.tiles * self.span + 4 * self.words

    def units(self, width: int) -> int:
        return ceil_div(width, self.unit)

    def row_bytes(self, width: int) -> int:
        return self.units(width) * self.unit_bytes

    def code_bytes(self, n_rows: int, width: int) -> int:
        return n_rows * self.units(width) * 2 * self.tiles * self.span


FOUR = Planes(4, False, 4)
FOUR_OFFSETS = Planes(4, True, 4)
FIVE_OFFSETS = Planes(5, True, 3)
SIX = Planes(6, False, 8, 16)
EIGHT = Planes(8, False, 4)
KINDS = (FOUR, FOUR_OFFSETS, FIVE_OFFSETS, SIX, EIGHT)

PACKED = {
    "Q4_0": FOUR,
    "Q4_1": FOUR_OFFSETS,
    "Q4_K": FOUR_OFFSETS,
    "Q5_0": FIVE_OFFSETS,
    "Q5_1": FIVE_OFFSETS,
    "Q5_K": FIVE_OFFSETS,
    "Q6_K": SIX,
    "Q8_0": EIGHT,
}

FACTORS = {"Q4_K": 63, "Q5_K": 63, "Q6_K": 128}  # the largest integer that multiplies an f16 of the file


def peak(rows: Bytes, type_name: str) -> float:
    """A limit of the sizes of scales and offsets as headers have them, before the power of two."""
    scale, offset = native.largest_scales(type_name, rows)  # the offset of Q5_0 is 16 scales, which is less
    return FACTORS.get(type_name, 1) * max(2.0 ** (14 + PACKED[type_name].bits) * scale, offset)


def shift(peaks: float) -> int:
    """The power of two that brings numbers of this size near the largest f16."""
    return LARGEST - int(np.frexp(peaks)[1]) if peaks else 0


def expanded(planes: Planes, codes: NDArray[np.uint16], headers: NDArray[np.uint32]) -> NDArray[np.float16]:
    """The weights, [rows, units * unit]: the definition of what kernels compute."""
    groups, units, _, _, span = codes.shape
    tiles = codes.transpose(0, 3, 1, 2, 4).reshape(groups * GROUP, units, planes.tiles, span)
    blocks = np.empty((groups * GROUP, units, planes.blocks, span), np.float64)
    for i in range(planes.blocks):
        code = tiles[:, :, i // planes.each] >> (i % planes.each * planes.field) & ((1 << planes.field) - 1)
        if planes.upper:
            code = code | (tiles[:, :, -1] >> (2 * i) & 3) << planes.field
        blocks[:, :, i] = code * 2.0 ** -(14 + planes.bits)
    halves = headers.transpose(2, 0, 1)[..., None] >> np.array([0, 16], np.uint32)
    numbers = halves.astype(np.uint16).view(np.float16)  # [rows, units, words, 2]
    if planes.offsets:
        scale, offset = numbers[..., 0], numbers[..., 1]
    else:
        scale = numbers.reshape(groups * GROUP, units, planes.blocks)
        offset = scale * np.float16(-(2.0**-15))
    # In f64 the product is exact, and the sum so nearly that it rounds to f16 as the exact one does.
    with np.errstate(invalid="ignore"):  # a scale of a damaged file may be infinite
        wide = scale.astype(np.float64)[..., None] * blocks + offset.astype(np.float64)[..., None]
    return wide.astype(np.float16).reshape(groups * GROUP, units * planes.unit)
