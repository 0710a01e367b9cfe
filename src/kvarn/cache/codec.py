"""The codec axis: how one head's vector at one position is stored.

A codec describes rows and computes nothing: a row is `units` of one type, and `scales` beside them. K and V are
described apart, so that a codec may pack several numbers into a unit, or store the two sides differently. What the
bytes mean is defined in backends/reference/codecs.py; every backend encodes and decodes to the same bits.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Types are spelled as NumPy does: f4, u2, i1."""

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
    tail: int = 0  # newest tokens of a sequence that are kept apart, until their tile is full and can be encoded

    def k_row(self, dim: int) -> Row:
        return Row(self.unit, dim, scales=self.scales)

    def v_row(self, dim: int) -> Row:
        return Row(self.unit, dim, scales=self.scales)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("f32", "f4"),
        Codec("f16", "f2"),
        Codec("bf16", "u2"),  # NumPy has no such type: the upper half of an f32
        Codec("int8", "i1", scales=1),
    )
}
