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


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    unit: str
    scales: int = 0  # per row
    per_unit: int = 1  # numbers of a unit
    block: int = 1  # a row is padded with zeros to a multiple of this many numbers
    tail: int = 0  # most tokens at the end of a sequence that are stored separately until their tile is full

    def row(self, dim: int) -> Row:
        return Row(self.unit, align(dim, self.block) // self.per_unit, scales=self.scales)


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


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("f32", "f4"),
        Codec("f16", "f2"),
        Codec("bf16", "u2"),  # NumPy has no bf16: a unit is the upper half of an f32
        Codec("int8", "u4", scales=1, per_unit=4, block=32),  # words of four numbers, rotated in blocks of 32
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
