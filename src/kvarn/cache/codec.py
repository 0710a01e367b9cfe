"""The codec axis: how one head's vector at one position is stored.

A codec describes rows: a number of units of one type, and a number of scales. It describes K and V
separately, because a codec may store them differently. A unit may hold several packed numbers.
Non-goal: computing. backends/reference/codecs.py defines what the bytes mean, and every backend
encodes and decodes to the same bits.
"""

from dataclasses import dataclass


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
    tail: int = 0  # most tokens at the end of a sequence that are stored separately until their tile is full

    def k_row(self, dim: int) -> Row:
        return Row(self.unit, dim, scales=self.scales)

    def v_row(self, dim: int) -> Row:
        return Row(self.unit, dim, scales=self.scales)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("f32", "f4"),
        Codec("f16", "f2"),
        Codec("bf16", "u2"),  # NumPy has no bf16: a unit is the upper half of an f32
        Codec("int8", "i1", scales=1),
    )
}
