"""Packed matrices: what planes mean, and the kernels that read them, against NumPy. What must not be read is NaN."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gpu.support.blocks import blocks, planes_of
from gpu.support.driving import same_bits
from gpu.support.launching import Board, as_stored
from gpu.support.oracle import relative
from gpu.support.packing import offsets_of

from kvarn.backends.cuda import selftest, specs, staging, tiling, weights
from kvarn.backends.cuda.planes import KINDS, PACKED, Planes, expanded
from kvarn.loading.checkpoint import Encoded
from kvarn.loading.progress import quiet

SUM = 5e-7  # of a product, relative to the sum of the sizes of its terms
HALF_ULP = 2.0**-11  # of f16, relative
TYPES = tuple(PACKED)


def width_of(type_name: str, n: int) -> int:
    """n blocks of the file, whole ones of 256 for the types that have them."""
    return n * (256 if type_name.endswith("K") else 32)


def true(type_name: str, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name]).astype(np.float64)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("size", [1.0, 3e-4, 3e3])
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("type_name", TYPES)
def test_weights_are_those_of_the_file(random, type_name: str, n: int, size: float) -> None:
    """But for the roundings of a scale, of an offset and of the weight. The power of two keeps small ones exact."""
    width = width_of(type_name, n)
    rows = blocks(type_name, (33, width), random, size)
    planes, power, codes, headers = planes_of(type_name, rows)
    found = expanded(planes, codes, headers)
    assert not found[33:].any()
    assert not found[:, width:].any()
    found, expected = found[:33, :width].astype(np.float64) * 2.0**-power, true(type_name, rows)
    # A scaled code and an offset: where they cancel, a weight is less exact than they are.
    offsets = offsets_of(rows, type_name)
    offsets = np.zeros_like(expected) if offsets is None else np.abs(offsets).repeat(planes.span, 1)
    limit = HALF_ULP * 1.001 * (2 * np.abs(expected) + 2 * offsets)
    assert (np.abs(found - expected) <= limit + 2.0 ** (-24 - power)).all()
    assert 2**-7 < np.abs(found).max() * 2.0**power < 4, "the range of f16 is used"


def test_q8_0_is_the_nearest_f16(random) -> None:
    rows = blocks("Q8_0", (16, 256), random)
    planes, power, codes, headers = planes_of("Q8_0", rows)
    scaled = np.ldexp(true("Q8_0", rows), power)
    assert (expanded(planes, codes, headers) == scaled.astype(np.float16)).all()


def test_bytes_of_a_row(random) -> None:
    bits = {planes.name: planes.row_bytes(1536) * 8 / 1536 for planes in KINDS}
    assert bits == {"packed4": 4.5, "packed4+": 5.0, "packed5+": 76 * 8 / 96, "packed6": 7.0, "packed8": 8.5}
    for type_name, planes in PACKED.items():
        width = width_of(type_name, 3)
        _, _, codes, headers = planes_of(type_name, blocks(type_name, (32, width), random))
        assert codes.nbytes + headers.nbytes == 32 * planes.row_bytes(width)
        assert codes.nbytes == planes.code_bytes(32, width)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("n_columns", "n"), [(1, 1), (70, 3), (129, 2)])
def test_products(driver, random, type_name: str, n_columns: int, n: int) -> None:
    """Every tile, and rows with the same bits in all of them."""
    board, width = Board(driver), width_of(type_name, n)
    matrix, weight = board.packed(type_name, blocks(type_name, (n_columns, width), random), width)
    x = random.standard_normal((tiling.SHARED_ROWS + 1, width), np.float32)
    wide = as_stored(x, "f16")
    whole = board.linear(matrix, x, spare=5)
    assert relative(whole, wide @ weight.T, np.abs(wide) @ np.abs(weight).T) < SUM
    for rows in (1, 9, 17, 33, 65):
        assert same_bits(board.linear(matrix, x[:rows]), whole[:rows]), rows
    assert {call.grid[1] for call in driver.launches("linear_packed")} == {1}


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("n_columns", "width", "splits"), [(70, 1280, 2), (40, 2304, 4)])
def test_splits_of_the_depth(driver, random, type_name: str, n_columns: int, width: int, splits: int) -> None:
    """A program per split, in any order, and one program for all of them give the same bits."""
    board, n = Board(driver), tiling.SHARED_ROWS + 1
    matrix, weight = board.packed(type_name, blocks(type_name, (n_columns, width), random), width)
    assert matrix.splits == splits
    x, into = (random.standard_normal((n, each), np.float32) for each in (width, n_columns))
    bias, wide = random.standard_normal(n_columns, np.float32), as_stored(x, "f16")
    whole = board.linear(matrix, x, bias, into, 0.25, spare=3)
    sizes = 0.25 * np.abs(wide) @ np.abs(weight).T + np.abs(bias) + np.abs(into)
    assert relative(whole, 0.25 * wide @ weight.T + bias + into, sizes) < SUM
    for rows in (1, 9, 30, 60, 100):
        driver.order = random
        found = board.linear(matrix, x[:rows], bias, into[:rows], 0.25, spare=3)
        assert same_bits(found, np.ascontiguousarray(whole[:rows])), rows
        assert driver.launches("linear_packed")[-1].grid[1] == splits


@pytest.mark.parametrize("planes", KINDS, ids=lambda planes: planes.name)
def test_every_split_has_units(planes: Planes) -> None:
    """A split that is empty would be a program for nothing."""
    for depth in range(tiling.DEPTH, 1 << 15, tiling.DEPTH):
        splits, units = tiling.splits_of(64, depth, packed=True), planes.units(depth)
        assert -(-units // splits) * (splits - 1) < units


@pytest.mark.parametrize("type_name", TYPES)
def test_bias_sum_and_scale(driver, random, type_name: str) -> None:
    board, width = Board(driver), width_of(type_name, 1)
    matrix, weight = board.packed(type_name, blocks(type_name, (70, width), random), width)
    x, into = random.standard_normal((3, width), np.float32), random.standard_normal((3, 70), np.float32)
    bias = random.standard_normal(70, np.float32)
    plain = 0.25 * as_stored(x, "f16") @ weight.T
    found = board.linear(matrix, x, bias, into, scale=0.25, spare=3)
    assert np.abs(found - (plain + bias + into)).max() < 1e-5 * np.abs(plain).max()


@pytest.mark.parametrize("type_name", TYPES)
def test_a_product_of_gate_and_up_that_is_gated(driver, random, type_name: str) -> None:
    """It has the bits of a product, and a gate after it, in every tile. 48 is no multiple of half a tile."""
    board, width, half = Board(driver), width_of(type_name, 1), 48
    matrix, _ = board.packed(type_name, blocks(type_name, (2 * half, width), random), width)
    x = random.standard_normal((tiling.SHARED_ROWS + 1, width), np.float32)
    gate, up = (np.ascontiguousarray(part) for part in np.split(board.linear(matrix, x, scale=0.25), 2, 1))
    whole = board.gate("silu", "f16", gate, up, specs.GATE_SCALE["f16"])
    for rows in (1, 9, 17, 33, 65, len(x)):
        found = board.gated(matrix, x[:rows], "silu", "f16", 0.25, specs.GATE_SCALE["f16"])
        assert same_bits(found, whole[:rows]), rows


@pytest.mark.parametrize("type_name", TYPES)
def test_embeddings(driver, random, type_name: str) -> None:
    """The same numbers that a product multiplies."""
    board, width = Board(driver), width_of(type_name, 5)
    matrix, weight = board.packed(type_name, blocks(type_name, (37, width), random), width)
    tokens = [36, 0, 15, 16, 17, 36]
    assert (board.embed_packed(matrix, tokens, width, 1.5) == (1.5 * weight[tokens]).astype(np.float32)).all()
    found = board.embed_packed(matrix, [-3, 4, -1, -2], width, 1.5, sampled=[36, -1, 17])  # an error is any token
    assert (found[:3] == (1.5 * weight[[17, 4, 36]]).astype(np.float32)).all()


def test_what_is_not_finite_stays_in_its_row_and_column(driver, random) -> None:
    board = Board(driver)
    rows = blocks("Q4_K", (70, 256), random)
    rows[7, :2] = np.array([np.inf], "<f2").view(np.uint8)
    matrix, _ = board.packed("Q4_K", rows, 256)
    x = random.standard_normal((5, 256), np.float32)
    x[2, 5] = np.nan
    found = board.linear(matrix, x)
    assert np.isnan(found[2]).all()
    assert not np.isfinite(found[:, 7]).any()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 7, 1)).all()


def test_tiles_and_products() -> None:
    def tiles(n_rows: int, splits: int) -> list[tuple[int, int, str]]:
        found = [tiling.tile_for("packed", n, n_rows, splits) for n in (1, 9, 17, 33, 65, 256, 257)]
        return [(tile.rows, tile.columns, mode) for tile, mode in found]

    few = [(8, 64, "shared"), (16, 64, "shared"), (32, 64, "shared"), (64, 64, "shared")]
    assert tiles(28672, 1) == few + [(128, 256, "whole")] * 3
    assert tiles(4096, 4) == few + [(64, 64, "shared")] * 2 + [(128, 128, "turns")]
    assert tiles(576, 1) == few + [(64, 64, "shared")] * 2 + [(128, 256, "whole")]
    for planes in KINDS:
        for kernel in (specs.linear_packed(planes, *tile) for tile in tiling.tiles("packed")):
            assert specs.ROWS % kernel.size("BM") == specs.COLUMNS % kernel.size("BN") == 0, "tiles are never cut"
        assert tiling.DEPTH % planes.span == 0, "a block is inside of the inputs, or behind them"
    names = {specs.product_of(kind) for kind in (*PACKED, "Q3_K", "IQ4_XS", "F16")}
    assert names == {"packed4", "packed4+", "packed5+", "packed6", "packed8", "f16"}
    assert {specs.form_of(kind) for kind in PACKED} == {"f16"}


def test_matrices_one_after_another(driver, random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two types, with rows that do not fill groups, packed in chunks by threads, with one power of two."""
    monkeypatch.setattr(weights, "PACK_CHUNK", 1)
    monkeypatch.setattr(staging, "PIECE", 1 << 13)
    stored = {
        "a": Encoded("Q4_1", (8, 512), blocks("Q4_1", (8, 512), random, 20.0)),
        "b": Encoded("Q4_K", (35, 512), blocks("Q4_K", (35, 512), random)),
        "c": Encoded("Q4_1", (4, 512), blocks("Q4_1", (4, 512), random)),
    }
    infos = [SimpleNamespace(name=name, type=each.type, shape=each.shape) for name, each in stored.items()]

    def read_rows(name: str, start: int, out: np.ndarray) -> None:
        out[...] = stored[name].rows[start:][: len(out)]

    shapes = {info.name: info.shape for info in infos}
    checkpoint = SimpleNamespace(infos=infos, shapes=shapes, read_rows=read_rows)
    loaded = weights.Weights(driver, checkpoint, 3, quiet)
    matrix = loaded.matrix("a", "b", "c")
    loaded.finish()
    planes = matrix.planes
    assert (matrix.n_rows, matrix.padded, matrix.depth, planes) == (47, 256, 512, PACKED["Q4_K"])
    assert loaded.nbytes == 256 * planes.row_bytes(512)
    codes = driver.view(matrix.address, (16, matrix.units, planes.tiles, 16, planes.span), np.uint16)
    headers = driver.view(matrix.headers, (matrix.units, planes.words, 256), np.uint32)
    found = expanded(planes, codes, headers).astype(np.float64) * matrix.scale
    expected = np.concatenate([true(each.type, each.rows) for each in stored.values()])
    assert np.abs(found[:47] - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(found[8:47] - expected[8:]).max() < 1e-3 * np.abs(expected[8:]).max()
    assert not found[47:].any()


@pytest.mark.parametrize("planes", KINDS, ids=lambda planes: planes.name)
def test_the_self_test(driver, random, planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are finite, and it sees one bit in one tile."""
    matrix = selftest._packed(driver, planes, selftest.DEPTHS[-1], random)
    assert matrix.splits == 4
    results = []
    download = driver.download
    monkeypatch.setattr(driver, "download", lambda address, out: (download(address, out), results.append(out)))
    assert selftest._products_agree(driver, matrix, random)
    assert [len(each) for each in results] == [8, 16, 32, 64, 128]
    assert all(np.isfinite(each).all() and each.any() for each in results)
    monkeypatch.setattr(driver, "download", lambda address, out: (download(address, out), _flip(out, 32)))
    assert not selftest._products_agree(driver, matrix, random)


def _flip(out: np.ndarray, n_rows: int) -> None:
    if len(out) == n_rows:
        out.view(np.uint32)[5, 7] ^= 1
