"""The codec axis: how one head's vector at one position is stored.

A codec describes rows: a number of units of one type, and a number of scales. A unit may hold several
packed numbers. K and V have each a codec: `int8/bf16` stores keys in int8 and values in bf16.
Non-goal: computing. backends/reference/codecs.py defines what the bytes mean, and every backend
encodes and decodes to the same bits.
"""

from dataclasses import dataclass

from kvarn.cache.spec import align
from kvarn.errors import KvarnError


@dataclass(frozen=True, slots=True)
class Row:
    """Unit types are NumPy's names: f4, u2, i1."""

    unit: str
    units: int
    scale_unit: str = "f4"
    scales: int = 0

    @property
    def nbytes(self) -> int:
        return self.units * unit_bytes(self.unit) + self.scales * unit_bytes(self.scale_unit)


def unit_bytes(unit: str) -> int:
    return int(unit[1:])


TILE = 32  # positions whose cells are made together, by a codec with a tail


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    unit: str
    block: int = 1  # numbers that are encoded together: a row is padded with zeros to whole blocks
    units: int = 1  # of a block
    scale_unit: str = ""  # empty: no scales
    per_scale: int = 0  # numbers that share a scale; 0: all numbers of the row
    tail: int = 0  # positions of a tile, if a query reads its own tile in int8 (docs/codecs.md, "The tail"); or 0

    def row(self, dim: int) -> Row:
        padded = align(dim, self.block)
        scales = padded // self.per_scale if self.per_scale else 1
        return Row(
            self.unit, padded // self.block * self.units, self.scale_unit or "f4", scales if self.scale_unit else 0
        )


@dataclass(frozen=True, slots=True)
class CodecPair:
    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"

    @property
    def tail(self) -> int:
        return max(self.k.tail, self.v.tail)

    @property
    def tails(self) -> "CodecPair":
        """How the tails of K and V are stored."""
        return CodecPair(*(CODECS["int8"] if codec.tail else NOTHING for codec in (self.k, self.v)))


NOTHING = Codec("", "u4", units=0)  # the tail of a codec without one

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("f32", "f4"),
        Codec("f16", "f2"),
        Codec("bf16", "u2"),  # NumPy has no bf16: a unit is the upper half of an f32
        Codec("int8", "u4", 32, 8, "f4"),  # words of four numbers, rotated in blocks of 32
        Codec("int6", "u4", 32, 6, "u1", 32, TILE),
        Codec("int4", "u4", 32, 4, "u1", 32, TILE),
    )
}


class CacheTypes(tuple[str, ...]):
    """The names that a user may give: those of codecs, and two of them as K/V."""

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        parts = name.split("/")
        return len(parts) <= 2 and all(tuple.__contains__(self, part) for part in parts)


def cache_types() -> CacheTypes:
    return CacheTypes(CODECS)


def codecs_of(name: str) -> CodecPair:
    """`K/V`, or one name for both."""
    if name not in cache_types():
        raise KvarnError(f"unknown cache type {name!r}; there are: {', '.join(CODECS)}, or two of them as K/V")
    k, _, v = name.partition("/")
    return CodecPair(CODECS[k], CODECS[v or k])
