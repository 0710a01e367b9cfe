"""Packed weights: unpacking gives the bits that the gguf package's dequantization gives, whatever the row count."""

import gguf
import numpy as np
import pytest
from harness import bits, pool
from test_quants import random_rows

from kvarn import isa
from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.quants import READABLE, grid_of

TYPES = sorted(READABLE)
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


def packed(raw: np.ndarray, name: str, columns: int) -> isa.Weight:
    return isa.native.pack(pool(), name, raw, columns, grid_of(name))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TYPES)
def test_every_type(name: str, rows: int) -> None:
    raw = sane_rows(name, rows, COLUMNS, seed=rows)
    weight = packed(raw, name, COLUMNS)
    assert (weight.rows, weight.cols) == (rows, COLUMNS)
    assert (bits(unpacked(weight)) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("columns", [32, 96, 544])
@pytest.mark.parametrize("name", [name for name in TYPES if ENCODINGS[name].block_size == 32])
def test_widths_of_any_whole_number_of_blocks(name: str, columns: int) -> None:
    raw = sane_rows(name, 19, columns)
    assert (bits(unpacked(packed(raw, name, columns))) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("columns", [1, 5, 31, 33, 100])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_of_any_width(name: str, columns: int) -> None:
    raw = sane_rows(name, 17, columns)
    assert (bits(unpacked(packed(raw, name, columns))) == bits(dequantized(raw, name))).all()


@pytest.mark.parametrize("name", TYPES)
def test_any_bytes_pack(name: str) -> None:
    """Scales that are infinite, NaN or denormal: the same numbers, and no crash."""
    raw = random_rows(name, 40, COLUMNS, seed=7)
    with np.errstate(all="ignore"):
        assert np.array_equal(unpacked(packed(raw, name, COLUMNS)), dequantized(raw, name), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "most"), [("Q2_K", 2.63), ("Q3_K", 3.57), ("Q4_K", 4.63), ("Q5_K", 5.63), ("Q6_K", 6.57)]
)
def test_k_types_keep_their_size(name: str, most: float) -> None:
    weight = packed(sane_rows(name, 32, 4096), name, 4096)
    assert 8 * weight.nbytes / (32 * 4096) < most
