"""Packing in C++ gives the bits of packing with NumPy, and writes nothing else."""

import threading

import numpy as np
import pytest
from gpu.support import packing
from gpu.support.blocks import blocks, planes_of, room

from kvarn import native
from kvarn.backends.cuda.planes import PACKED, expanded, peak
from kvarn.loading.encodings import ENCODINGS

PLACES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}  # of the f16 numbers of a block; else (0, 2)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


def anything(type_name: str, n_rows: int, n_blocks: int, random: np.random.Generator) -> np.ndarray:
    """Any bytes at all. Scales are all kinds of f16: finite, subnormal, zero, infinite, NaN."""
    found = random.integers(0, 256, (n_rows, n_blocks, ENCODINGS[type_name].block_bytes), np.uint8)
    for at in PLACES.get(type_name, (0, 2)):
        halves = random.integers(0, 1 << 16, (n_rows, n_blocks), np.uint16)
        special = np.array([0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFE00], np.uint16)
        halves = np.where(random.random(halves.shape) < 0.5, halves, random.choice(special, halves.shape))
        found[..., at : at + 2] = halves.astype("<u2")[..., None].view(np.uint8)
    return found.reshape(n_rows, -1)


def equal(found: np.ndarray, expected: np.ndarray) -> bool:
    """Of headers. A NaN may be any NaN."""
    a, b = found.view(np.uint16), expected.view(np.uint16)
    nan = np.isnan(a.view(np.float16)) & np.isnan(b.view(np.float16))
    return bool(((a == b) | nan).all())


@pytest.mark.parametrize("power", [0, -27, 38])
@pytest.mark.parametrize(("n_blocks", "n_rows", "row", "column"), [(1, 1, 0, 0), (3, 33, 0, 0), (8, 37, 21, 5)])
@pytest.mark.parametrize("type_name", PACKED)
def test_bits(random, type_name: str, n_blocks: int, n_rows: int, row: int, column: int, power: int) -> None:
    """From any row on, with any scales."""
    rows = anything(type_name, n_rows, n_blocks, random)
    tiles, words = packing.packed(rows, type_name, power)
    codes, headers = room(type_name, rows, row + n_rows + 16)
    expected_codes, expected_headers = codes.copy(), headers.copy()
    packing.group(tiles, expected_codes, row)
    expected_headers[..., column : column + n_rows] = words.transpose(1, 2, 0)
    native.pack_planes(type_name, rows, power, codes, row, headers, column)
    assert (codes == expected_codes).all()
    assert equal(headers, expected_headers)


@pytest.mark.parametrize("width", [576, 2560, 4096, 14336])
@pytest.mark.parametrize("type_name", PACKED)
def test_bits_of_real_shapes(random, type_name: str, width: int) -> None:
    if width % ENCODINGS[type_name].block_size:
        width += 192
    rows = blocks(type_name, (40, width), random)
    planes, power, codes, headers = planes_of(type_name, rows)
    tiles, words = packing.packed(rows, type_name, power)
    expected = np.zeros_like(codes)
    packing.group(tiles, expected, 0)
    assert (codes == expected).all()
    assert (headers[..., :40] == words.transpose(1, 2, 0)).all()
    assert np.isfinite(expanded(planes, codes, headers)).all()


@pytest.mark.parametrize("type_name", PACKED)
def test_the_largest_scale(random, type_name: str) -> None:
    """Of the finite ones, wherever it is."""
    for n_rows, n_blocks in [(1, 1), (5, 7)] * 5:
        rows = anything(type_name, n_rows, n_blocks, random)
        assert peak(rows, type_name) == packing.peak(rows, type_name)
    for value in ("inf", "nan"):
        rows = np.zeros((2, ENCODINGS[type_name].block_bytes), np.uint8)
        at = PLACES.get(type_name, (0,))[0]
        rows[1, at : at + 2] = np.array([value], "<f2").view(np.uint8)
        assert peak(rows, type_name) == 0


def test_threads_pack_at_the_same_time(random) -> None:
    """Into the same arrays."""
    rows = blocks("Q4_K", (64, 1024), random)
    _, power, expected, words = planes_of("Q4_K", rows)
    codes, headers = room("Q4_K", rows, 64)

    def part(row: int) -> None:
        native.pack_planes("Q4_K", rows[row : row + 16], power, codes, row, headers, row)

    threads = [threading.Thread(target=part, args=(row,)) for row in (0, 16, 32, 48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (codes == expected).all()
    assert (headers == words).all()
