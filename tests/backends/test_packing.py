"""Packed weights: unpacking gives the bits that the gguf package's dequantization gives, whatever the row count."""

import numpy as np
import pytest
from support.harness import bits, pool
from support.stored_rows import TYPES, dequantized, random_rows, sane_rows

from kvarn import native
from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.quants import grid_of

ROWS, COLUMNS = (1, 15, 16, 17, 33), 512


def unpacked(weight: native.PackedMatrix) -> np.ndarray:
    out = np.full((weight.rows, weight.cols), np.nan, np.float32)
    weight.unpack(out)
    return out


def packed(raw: np.ndarray, name: str, columns: int) -> native.PackedMatrix:
    return native.pack(pool(), name, raw, columns, grid_of(name))


@pytest.mark.requirement(41)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TYPES)
def test_unpacking_gives_the_bits_of_the_gguf_package(name: str, rows: int) -> None:
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


@pytest.mark.requirement(42)
@pytest.mark.parametrize(
    ("name", "most"), [("Q2_K", 2.63), ("Q3_K", 3.57), ("Q4_K", 4.63), ("Q5_K", 5.63), ("Q6_K", 6.57)]
)
def test_k_types_keep_their_size(name: str, most: float) -> None:
    weight = packed(sane_rows(name, 32, 4096), name, 4096)
    assert 8 * weight.nbytes / (32 * 4096) < most
