"""The kernel `linear` against NumPy in float64. Behind rows, columns and tiles of its arguments are NaNs."""

import numpy as np
import pytest
from gpu.support.launching import FORMS, Board, as_stored
from gpu.support.oracle import relative

from kvarn.backends.cuda import specs

SUM = 5e-7  # of a product, relative to the sum of the sizes of its terms
SHAPES = [(1, 8), (64, 64), (129, 72), (200, 130)]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 16, 17, 65, 129])
def test_every_tile(driver, random, form: str, shape: tuple[int, int], n: int) -> None:
    board = Board(driver)
    weight, x = random.standard_normal(shape, np.float32), random.standard_normal((n, shape[1]), np.float32)
    wide, stored = as_stored(x, form), as_stored(weight, form)
    found = board.linear(board.matrix(form, weight), x, spare=5)
    assert relative(found, wide @ stored.T, np.abs(wide) @ np.abs(stored).T) < SUM


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_bias_sum_and_scale(driver, random, form: str, biased: bool, adds: bool) -> None:
    board, (rows, depth) = Board(driver), (70, 40)
    weight, x = random.standard_normal((rows, depth), np.float32), random.standard_normal((3, depth), np.float32)
    bias, into = random.standard_normal(rows, np.float32), random.standard_normal((3, rows), np.float32)
    expected = 0.25 * as_stored(x, form) @ as_stored(weight, form).T + biased * bias + adds * into
    found = board.linear(
        board.matrix(form, weight), x, bias if biased else None, into if adds else None, scale=0.25, spare=3
    )
    assert np.abs(found - expected).max() < 1e-5


def test_what_is_not_finite_stays_in_its_row_and_column(driver, random) -> None:
    board, shape = Board(driver), (70, 64)
    weight, x = random.standard_normal(shape, np.float32), random.standard_normal((5, 64), np.float32)
    weight[7, 3], x[2, 5] = np.inf, np.nan
    found = board.linear(board.matrix("bf16", weight), x)
    assert np.isnan(found[2]).all()
    assert np.isinf(np.delete(found[:, 7], 2)).all()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 7, 1)).all()


def test_the_tile_follows_the_number_of_rows() -> None:
    tiles = [specs.linear("bf16", n).size("BM") for n in (1, 16, 17, 64, 65, 128, 129, 5000)]
    assert tiles == [16, 16, 64, 64, 128, 128, 128, 128]
    for form in FORMS:
        for n in specs.ROW_TILES:
            kernel = specs.linear(form, n)
            assert specs.ROWS % kernel.size("BM") == specs.COLUMNS % kernel.size("BN") == 0, "tiles are never cut"
            assert specs.DEPTH % kernel.size("BK") == 0
