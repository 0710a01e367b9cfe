"""Kernels over rows against NumPy in float64: embeddings, norms, gates, sums, rounding, angles, tables.

`spare` puts NaNs behind each row: a kernel that reads past the width shows it.
"""

import numpy as np
import pytest
from gpu.support import oracle
from gpu.support.launching import FORMS, ROUNDOFF, Board, as_stored, decoded
from gpu.support.oracle import relative

from kvarn.backends.cuda import specs

WIDTHS = (1, 72, 1024, 1030)  # less than a stretch, a whole one, and more
F32 = 5e-7  # relative error of a few operations in f32
EPS = 1e-5
SMALLEST_NORMAL = 2.0**-14  # of f16: below it, a rounding has the same error
LARGEST = 65504.0  # of f16


@pytest.fixture
def board(driver) -> Board:
    return Board(driver)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(3)


def rows(random: np.random.Generator, n: int, width: int) -> np.ndarray:
    return random.standard_normal((n, width), np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_embed(board: Board, random, form: str, width: int) -> None:
    """The padding of the matrix is NaN here."""
    weight, tokens = rows(random, 9, width), [8, 0, 3, 3]
    found = board.embed(form, tokens, weight, 1.5)
    assert (found == (1.5 * as_stored(weight, form)[tokens]).astype(np.float32)).all()
    found = board.embed(form, [-3, 4, -1, -2], weight, 1.5, sampled=[6, -1, 2])  # an error is any token
    assert (found[:3] == (1.5 * as_stored(weight, form)[[2, 4, 6]]).astype(np.float32)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(board: Board, random, form: str, width: int) -> None:
    x, weight = rows(random, 3, width), random.standard_normal(width, np.float32)
    found = decoded(board.norm(form, x, weight, EPS, spare=5), form)
    assert relative(found[:, :width], oracle.norm(x, weight, EPS)) < 1.01 * ROUNDOFF[form] + F32
    assert not found[:, width:].any(), "the padding stays zero"


@pytest.mark.parametrize("width", [specs.ROW_STRETCH, specs.ROW_STRETCH + 4])
def test_norm_of_rows_that_are_read_twice(board: Board, random, width: int) -> None:
    x, weight = rows(random, 2, width), random.standard_normal(width, np.float32)
    expected = oracle.norm(x, weight, EPS)
    assert relative(board.norm("f32", x, weight, EPS)[:, :width], expected) < F32
    assert relative(board.norm_add(x, weight, 0 * x, EPS)[:, :width], expected) < F32


def test_norm_of_zeros_is_zero(board: Board) -> None:
    zeros = np.zeros((2, 72), np.float32)
    assert not board.norm("f32", zeros, np.ones(72, np.float32), EPS).any()


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_add(board: Board, random, width: int) -> None:
    x, into, weight = rows(random, 3, width), rows(random, 3, width), random.standard_normal(width, np.float32)
    added = oracle.norm(x, weight, EPS)
    found = board.norm_add(x, weight, into, EPS, spare=5)
    assert relative(found, added + into, np.abs(added) + np.abs(into)) < F32


@pytest.mark.parametrize("width", WIDTHS)
def test_add(board: Board, random, width: int) -> None:
    x, into = rows(random, 4, width), rows(random, 4, width)
    assert (board.add(x, into, spare=5) == x + into).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width", [72, 1030])
def test_gate(board: Board, random, activation: str, form: str, width: int) -> None:
    gate, up, scale = 4 * rows(random, 2, width), rows(random, 2, width), specs.GATE_SCALE[form]
    expected = oracle.gate(activation, gate, up)
    sizes = np.abs(expected) + 1e-3 * np.abs(up)  # far below zero an activation is a difference of large numbers
    found = decoded(board.gate(activation, form, gate, up, scale, spare=5), form)
    least = SMALLEST_NORMAL / scale if form == "f16" else 0.0
    error = relative(found[:, :width] / scale, expected, np.maximum(sizes, least))
    assert error < 1.01 * ROUNDOFF[form] + 8 * F32
    assert not found[:, width:].any()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gate_far_from_zero(board: Board, activation: str) -> None:
    gate = np.array([[-1e4, -200, -50, 0, 50, 200, 1e4]], np.float32)
    found = board.gate(activation, "f32", gate, np.ones_like(gate))[0, :7]
    assert np.allclose(found, [0, 0, 0, 0, 50, 200, 1e4], rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_select(board: Board, random, form: str, width: int) -> None:
    x = rows(random, 4, width)
    found = decoded(board.select(form, [3, 0, 0], x, spare=5), form)
    assert (found[:, :width] == as_stored(x, form)[[3, 0, 0]]).all()
    assert not found[:, width:].any()


@pytest.mark.parametrize("form", ["f16", "bf16"])
def test_a_form_rounds_half_to_even(board: Board, form: str) -> None:
    ties = np.array([[1 + ROUNDOFF[form], 1 + 3 * ROUNDOFF[form], -1 - ROUNDOFF[form]]], np.float32)
    expected = [[1, 1 + 4 * ROUNDOFF[form], -1]]
    assert (decoded(board.select(form, [0], ties), form)[:, :3] == expected).all()


def test_f16_saturates_and_keeps_what_is_not_finite(board: Board) -> None:
    """A finite number beyond the range of f16 becomes the largest one."""
    x = np.array([[LARGEST, 65519, 65520, 1e30, -1e30, np.inf, -np.inf, np.nan]], np.float32)
    expected = np.array([LARGEST] * 4 + [-LARGEST, np.inf, -np.inf, np.nan])
    ones = np.ones_like(x)
    assert np.array_equal(board.select("f16", [0], x)[0, :8], expected, equal_nan=True)
    gated = board.gate("silu", "f16", np.full_like(x, 40), x / 40)
    assert np.array_equal(gated[0, :8], expected, equal_nan=True)
    large = np.array([[1.0, 0.0]], np.float32)
    normed = board.norm("f16", large, np.array([1e5, 1e5], np.float32), 0.0)
    assert normed[0, :2].tolist() == [LARGEST, 0]
    assert (board.norm("f32", ones, ones[0], 0.0)[0, :8] == 1).all()


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("half", [4, 32, 128])
def test_angles(board: Board, base: float, half: int) -> None:
    """Positions up to a million, and the largest that there is."""
    positions = [0, 1, 4095, 131_071, 999_999, 2**31 - 1]
    turns = base ** -(np.arange(half) / half) / (2 * np.pi)
    cos, sin = board.angles(positions, turns, 1.25)
    angle = 2 * np.pi * np.modf(np.array(positions)[:, None] * turns)[0]
    assert np.abs(cos - 1.25 * np.cos(angle)).max() < 1e-6
    assert np.abs(sin - 1.25 * np.sin(angle)).max() < 1e-6


@pytest.mark.parametrize("n", [1, 1024, 1030])
def test_edit(board: Board, random, n: int) -> None:
    index, value = random.permutation(3000)[:n], random.integers(0, 2**31, n)
    table = board.put(np.full(3000, -7, np.int32))
    edits = board.put(np.stack([index, value], 1).astype(np.int32))
    board.launch(specs.edit(), (-(-n // specs.STRETCH), 1, 1), edits, table, n)
    expected = np.full(3000, -7, np.int32)
    expected[index] = value
    assert (board.get(table, (3000,), "i32") == expected).all()
