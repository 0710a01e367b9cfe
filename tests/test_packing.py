"""Packed weights: unpacking gives the bits that the gguf package's dequantization gives, whatever the row count."""

import gguf
import numpy as np
import pytest
from harness import bits, pool
from test_quants import random_rows

from kvarn import isa
from kvarn.backends.cpu.program import OWN_KINDS
from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.quants import READABLE

TAIL = sorted(READABLE - set(OWN_KINDS))
F16_SCALES = {  # where a block keeps its f16 numbers
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "F16": (0,),
    "BF16": (0,),
}
ROWS, COLUMNS = (1, 15, 16, 17, 33), 512


def sane_rows(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes as stored blocks, with scales that are finite and not tiny."""
    raw = random_rows(name, rows, columns, seed)
    rng = np.random.default_rng(seed + 1)
    blocks = raw.reshape(-1, ENCODINGS[name].block_bytes)
    if name == "F32":
        blocks[:] = rng.standard_normal(len(blocks)).astype("<f4").view(np.uint8).reshape(-1, 4)
    elif name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, len(blocks))  # a power of two
    elif name == "IQ1_M":
        scales = blocks[:, 48:].view("<u2")  # the upper nibbles are one f16, lowest first
        half = rng.uniform(0.01, 2, len(blocks)).astype("<f2").view("<u2")
        for i in range(4):
            scales[:, i] = (scales[:, i] & 0x0FFF) | ((half >> (4 * i)) & 15) << 12
    else:
        for at in F16_SCALES.get(name, (0,)):
            numbers = (rng.uniform(0.01, 2, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype("<f2")
            blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return raw


def dequantized(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def unpacked(weight: isa.Weight) -> np.ndarray:
    out = np.full((weight.rows, weight.cols), np.nan, np.float32)
    weight.unpack(out)
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OWN_KINDS)
def test_types_with_a_packing_of_their_own(name: str, rows: int) -> None:
    raw = sane_rows(name, rows, COLUMNS, seed=rows)
    weight = isa.native.pack(pool(), name, raw, COLUMNS)
    assert (weight.rows, weight.cols) == (rows, COLUMNS)
    assert (bits(unpacked(weight)) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TAIL)
def test_other_types_become_codes_and_scales_that_give_the_same_numbers(name: str, rows: int) -> None:
    expected = np.ascontiguousarray(dequantized(sane_rows(name, rows, COLUMNS, seed=rows), name))
    weight = isa.native.pack_numbers(pool(), expected)
    assert weight is not None
    assert weight.integer
    assert (unpacked(weight) == expected).all()  # as numbers: 0 has one sign


@pytest.mark.parametrize("columns", [32, 96, 544])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_widths_of_any_whole_number_of_blocks(name: str, columns: int) -> None:
    raw = sane_rows(name, 19, columns)
    weight = isa.native.pack(pool(), name, raw, columns)
    assert (bits(unpacked(weight)) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("columns", [1, 5, 31, 33, 100])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_of_any_width(name: str, columns: int) -> None:
    raw = sane_rows(name, 17, columns)
    weight = isa.native.pack(pool(), name, raw, columns)
    assert (bits(unpacked(weight)) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("name", OWN_KINDS)
def test_any_bytes_pack(name: str) -> None:
    """Scales that are infinite, NaN or denormal: the same numbers, and no crash."""
    raw = random_rows(name, 40, COLUMNS, seed=7)
    ours = unpacked(isa.native.pack(pool(), name, raw, COLUMNS))
    with np.errstate(all="ignore"):
        assert np.array_equal(ours, dequantized(raw, name), equal_nan=True)


@pytest.mark.parametrize("name", TAIL)
def test_any_bytes_of_other_types_pack_or_are_refused(name: str) -> None:
    expected = np.ascontiguousarray(dequantized(random_rows(name, 40, COLUMNS, seed=7), name))
    weight = isa.native.pack_numbers(pool(), expected)
    if weight is not None:
        assert (unpacked(weight) == expected).all()


@pytest.mark.parametrize(
    "numbers",
    [
        np.random.default_rng(0).standard_normal((3, 64)),
        np.full((3, 64), np.nan),
        np.full((3, 64), np.inf),
        np.tile([1.0, 1e-38], (3, 32)),
        np.tile([128.0, 1.0], (3, 32)),
    ],
    ids=["random", "nan", "inf", "far apart", "one too many"],
)
def test_numbers_that_are_no_codes_are_refused(numbers: np.ndarray) -> None:
    assert isa.native.pack_numbers(pool(), numbers.astype(np.float32)) is None


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 2.0**-140 * 3, 2.0**120])
def test_extreme_scales_of_numbers(scale: float) -> None:
    numbers = (np.arange(-127, 129).clip(-127, 127).reshape(4, 64) * scale).astype(np.float32)
    weight = isa.native.pack_numbers(pool(), numbers)
    if weight is not None:
        assert (unpacked(weight) == numbers).all()
