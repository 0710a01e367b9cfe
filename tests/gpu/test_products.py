"""The kernel `linear` against NumPy in float64. Behind rows, columns and tiles of its arguments are NaNs."""

import numpy as np
import pytest
from gpu.support.driving import same_bits
from gpu.support.launching import FORMS, Board, as_stored
from gpu.support.oracle import relative

from kvarn.backends.cuda import specs, tiling
from kvarn.backends.cuda.products import Products

SUM = 5e-7  # of a product, relative to the sum of the sizes of its terms
SHAPES = [(1, 8), (64, 64), (129, 72), (200, 130)]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 17, 33, 65, 129, 257])
def test_every_tile(driver, random, form: str, shape: tuple[int, int], n: int) -> None:
    board = Board(driver)
    weight, x = random.standard_normal(shape, np.float32), random.standard_normal((n, shape[1]), np.float32)
    wide, stored = as_stored(x, form), as_stored(weight, form)
    found = board.linear(board.matrix(form, weight), x, spare=5)
    assert relative(found, wide @ stored.T, np.abs(wide) @ np.abs(stored).T) < SUM


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "splits"), [((70, 2060), 2), ((40, 4500), 4)])
def test_splits_of_the_depth(driver, random, form: str, shape: tuple[int, int], splits: int) -> None:
    """A program per split, in any order, and one program for all of them give the same bits."""
    board, n = Board(driver), tiling.SHARED_ROWS + 1
    weight, x = random.standard_normal(shape, np.float32), random.standard_normal((n, shape[1]), np.float32)
    matrix = board.matrix(form, weight)
    assert matrix.splits == splits
    bias, into = random.standard_normal(shape[0], np.float32), random.standard_normal((n, shape[0]), np.float32)
    wide, stored = as_stored(x, form), as_stored(weight, form)
    whole = board.linear(matrix, x, bias, into, 0.25, spare=3)
    expected = 0.25 * wide @ stored.T + bias + into
    assert relative(whole, expected, 0.25 * np.abs(wide) @ np.abs(stored).T + np.abs(bias) + np.abs(into)) < SUM
    added = 0
    for rows, order in ((1, None), (1, random), (20, random), (60, None), (tiling.SHARED_ROWS, random)):
        driver.order = order
        found = board.linear(matrix, x[:rows], bias, into[:rows], 0.25, spare=3)
        assert same_bits(found, np.ascontiguousarray(whole[:rows])), rows
        assert [call.grid[1] for call in driver.launches("linear")][-1] == splits
        assert len(driver.launches("total")) == (added := added + (rows > tiling.APART_ROWS))


def test_counters_are_zero_again_and_memory_is_enough(driver, random) -> None:
    """One memory serves products of several shapes, one after another."""
    board, products = Board(driver), Products(driver)
    matrices = [board.matrix("bf16", random.standard_normal(shape, np.float32)) for shape in ((70, 2060), (300, 4096))]
    products.reserve(matrices)
    for _ in range(2):
        for matrix in matrices:
            for n in (1, 20, 129):
                out = board.room(4 * n * matrix.n_rows)
                products.launch(board.room(2 * tiling.SHARED_ROWS * matrix.depth, 0), matrix, out, matrix.n_rows, n)
                assert not board.get(out, (n, matrix.n_rows), "f32").any()
    counters = products._counters
    assert counters is not None
    assert not driver.view(counters.address, (counters.nbytes // 4,), np.int32).any()


def test_the_number_of_splits_follows_from_the_shape() -> None:
    """Of Llama 3 8B (qkv, o, gate and up, down, logits), of TinyLlama, and of small matrices."""
    large = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    assert [tiling.splits_of(*shape) for shape in large] == [2, 4, 1, 4, 1]
    small = [(2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048), (64, 128), (64, 1920)]
    assert [tiling.splits_of(*shape) for shape in small] == [2, 2, 1, 4, 1, 1, 1]
    assert tiling.splits_of(16, 1 << 20) == tiling.MOST_SPLITS
    assert [tiling.splits_of(*shape, packed=True) for shape in large] == [4, 4, 1, 4, 1]


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


@pytest.mark.parametrize("activation", specs.ACTIVATION_CODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 17, 65, 129, 257])
def test_a_product_of_gate_and_up_that_is_gated(driver, random, activation: str, form: str, n: int) -> None:
    """It has the bits of a product, and a gate after it. 112 is no multiple of half a tile."""
    board, (half, depth) = Board(driver), (112, 72)
    weight, x = random.standard_normal((2 * half, depth), np.float32), random.standard_normal((n, depth), np.float32)
    matrix, into = board.matrix(form, weight), "f16" if form == "f32" else form
    factor = specs.GATE_SCALE[into]
    product = board.linear(matrix, x, scale=0.25)
    gate, up = (np.ascontiguousarray(part) for part in np.split(product, 2, 1))
    expected = board.gate(activation, into, gate, up, factor)
    found = board.gated(matrix, x, activation, into, 0.25, factor)
    assert same_bits(found, expected)
    assert found[:, :half].any()


def test_what_is_not_finite_stays_in_its_row_and_column(driver, random) -> None:
    board, shape = Board(driver), (70, 64)
    weight, x = random.standard_normal(shape, np.float32), random.standard_normal((5, 64), np.float32)
    weight[7, 3], x[2, 5] = np.inf, np.nan
    found = board.linear(board.matrix("bf16", weight), x)
    assert np.isnan(found[2]).all()
    assert np.isinf(np.delete(found[:, 7], 2)).all()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 7, 1)).all()


def test_the_tile_follows_the_number_of_rows() -> None:
    def tiles(n_rows: int, splits: int) -> list[tuple[int, int, str]]:
        found = [tiling.tile_for("bf16", n, n_rows, splits) for n in (1, 16, 17, 33, 65, 256, 257)]
        return [(tile.rows, tile.columns, mode) for tile, mode in found]

    few = [(32, 64, "shared"), (64, 64, "shared")]
    assert tiles(28672, 1) == [(16, 64, "shared")] * 2 + few + [(128, 64, "shared")] * 2 + [(256, 128, "whole")]
    assert tiles(4096, 4) == [(16, 64, "shared")] * 2 + few + [(128, 64, "shared")] * 2 + [(256, 64, "turns")]
    assert tiles(2048, 2) == [(16, 32, "shared")] * 2 + few + [(128, 64, "shared")] * 2 + [(256, 64, "turns")]
    for form in FORMS:
        for kernel in (specs.linear(form, *tile) for tile in tiling.tiles(form)):
            assert specs.ROWS % kernel.size("BM") == specs.COLUMNS % kernel.size("BN") == 0, "tiles are never cut"
            assert tiling.DEPTH % kernel.size("BK") == 0


@pytest.mark.parametrize("kind", tiling.TILES)
def test_every_tile_that_is_chosen_is_in_the_catalogue(kind: str) -> None:
    shapes = [(n_rows, splits) for n_rows in (64, 9999, 99999) for splits in (1, 2, 8)]
    chosen = [tiling.tile_for(kind, n, *shape) for n in range(1, 300) for shape in shapes]
    assert set(chosen) == set(tiling.tiles(kind))


@pytest.mark.parametrize("shape", [(1, 7), (8, 3), (9, 5), (20, 1), (16, 4)])
def test_row_tiles_take_turns(driver, random, shape: tuple[int, int]) -> None:
    """Every tile is computed once: 16 rows and 32 columns each, in f32."""
    n, (columns, depth) = 16 * shape[0] - 3, (32 * shape[1] - 1, 8)
    weight, x = random.standard_normal((columns, depth), np.float32), random.standard_normal((n, depth), np.float32)
    board = Board(driver)
    found = board.linear(board.matrix("f32", weight), x)
    assert relative(found, x.astype(np.float64) @ weight.T, np.abs(x) @ np.abs(weight).T) < SUM
    assert driver.launches("linear")[-1].grid == (shape[0] * shape[1], 1, 1)
