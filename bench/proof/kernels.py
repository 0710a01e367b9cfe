"""Each kernel once against NumPy in float64, on shapes of real models. Attention is in conformance.py."""

from collections.abc import Callable

import numpy as np
from gpu.support import oracle
from gpu.support.blocks import blocks
from gpu.support.launching import FORMS, ROUNDOFF, Board, as_stored, decoded
from gpu.support.oracle import relative
from gpu.support.sampling import HISTORY, KINDS, SETTINGS, Tried, logits_of, params
from numpy.typing import NDArray

from kvarn.backends.cuda import specs
from kvarn.backends.cuda.planes import PACKED
from kvarn.backends.cuda.products import Gating
from kvarn.backends.cuda.weights import Matrix
from kvarn.engine.drafting import make_drafter
from kvarn.engine.sampling import make_sampler
from proof.report import Report
from proof.site import Site

F32 = 2e-6  # relative error of a few operations in f32
SMALLEST_NORMAL = 2.0**-14  # of f16: below it, the error of a rounding does not get smaller
SUM = {"f32": 1e-6, "f16": 5e-6, "bf16": 5e-6}  # of a product, relative to the sum of the sizes of its terms


def run(site: Site, report: Report) -> None:
    for section in (_rows, _gates, _angles, _tables, _sampling):
        section(site, report)
    full = [(4096, 4096), (14336, 4096), (4096, 14336), (1536, 576), (100, 72)]
    shapes = site.pick(full, [(512, 1024), (100, 72)], [(130, 72)], [(40, 72)])
    rows = site.pick((1, 2, 16, 17, 64, 65, 128, 129, 300), (1, 17, 65, 129), (1, 17), (1, 17))
    for form in FORMS:
        with report.check(f"linear {form}") as check:
            for shape in shapes:
                board, random = Board(site.driver), site.random(5)
                weight = random.standard_normal(shape, np.float32)
                given = board, random, form, board.matrix(form, weight), as_stored(weight, form)
                _products(*given, rows, check.within)
                _gated(board, random, given[3], rows, check.case)
    full = [(4096, 4096), (14336, 4096), (4096, 14336), (1536, 768), (100, 256)]
    shapes = site.pick(full, [(512, 1024), (100, 256)], [(130, 256)], [(40, 256)])
    for type_name in PACKED:
        with report.check(f"linear_packed, embed_packed {type_name}") as check:
            for n_rows, width in shapes:
                board, random = Board(site.driver), site.random(5)
                stored = blocks(type_name, (n_rows, width), random)
                matrix, weight = board.packed(type_name, stored, width)
                _products(board, random, "f16", matrix, weight, rows, check.within)
                _gated(board, random, matrix, rows, check.case)
                tokens = random.integers(0, n_rows, 20).tolist()
                found, expected = board.embed_packed(matrix, tokens, width), weight[tokens].astype(np.float32)
                check.case(bool((found == expected).all()), f"{n_rows}x{width}: embeddings")


def _rows(site: Site, report: Report) -> None:
    board, random = Board(site.driver), site.random(1)
    n, width = site.pick((64, 4096), (9, 1100), (3, 100))
    x, into = random.standard_normal((2, n, width), np.float32)
    weight, eps = random.standard_normal(width, np.float32), 1e-5
    for form in FORMS:
        table = random.standard_normal((site.pick(1000, 50, 20), width), np.float32)
        with report.check(f"embed, norm, select {form}") as check:
            tokens = random.integers(0, len(table), n).tolist()
            error = relative(board.embed(form, tokens, table, 1.5), 1.5 * as_stored(table, form)[tokens])
            check.within("embed", error, F32, "embed")
            found = decoded(board.norm(form, x, weight, eps, spare=3), form)
            check.case(not found[:, width:].any(), "norm: the padding was written")
            expected = oracle.norm(x, weight, eps)
            error = relative(found[:, :width], expected, np.maximum(np.abs(expected), SMALLEST_NORMAL))
            check.within("norm", error, 1.01 * ROUNDOFF[form] + F32, "norm")
            rows = random.integers(0, n, n).tolist()
            found = decoded(board.select(form, rows, x, spare=3), form)
            check.case(bool((found[:, :width] == as_stored(x, form)[rows]).all()), "select")
            check.case(not found[:, width:].any(), "select: the padding was written")
    with report.check("norm_add, add") as check:
        expected = oracle.norm(x, weight, eps) + into
        sizes = np.abs(oracle.norm(x, weight, eps)) + np.abs(into)
        check.within("norm_add", relative(board.norm_add(x, weight, into, eps, 3), expected, sizes), F32, "norm_add")
        check.case(bool((board.add(x, into, 3) == x + into).all()), "add")


def _gates(site: Site, report: Report) -> None:
    board, random = Board(site.driver), site.random(2)
    n, width = site.pick((64, 14336), (5, 2000), (2, 100))
    gate, up = 4 * random.standard_normal((2, n, width), np.float32)
    for activation in ("silu", "gelu"):
        with report.check(f"gate {activation}") as check:
            expected = oracle.gate(activation, gate, up)
            sizes = np.abs(expected) + 1e-3 * np.abs(up)  # far from zero gelu is a difference of large numbers
            for form in FORMS:
                scale = specs.GATE_SCALE[form]
                found = decoded(board.gate(activation, form, gate, up, scale, 3), form)[:, :width] / scale
                least = SMALLEST_NORMAL / scale if form == "f16" else 0.0
                limit = 1.01 * ROUNDOFF[form] + 8 * F32
                check.within(form, relative(found, expected, np.maximum(sizes, least)), limit, form)


def _angles(site: Site, report: Report) -> None:
    with report.check("angles") as check:
        positions = [0, 1, 4095, 131_071, 999_999, 2**31 - 1, *site.random(3).integers(0, 1 << 20, 50).tolist()]
        for base, half in ((10_000.0, 64), (500_000.0, 64), (1_000_000.0, 128)):
            turns = base ** -(np.arange(half) / half) / (2 * np.pi)
            cos, sin = Board(site.driver).angles(positions, turns)
            angle = 2 * np.pi * np.modf(np.array(positions)[:, None] * turns)[0]
            error = max(np.abs(cos - np.cos(angle)).max(), np.abs(sin - np.sin(angle)).max())
            check.within("error", float(error), 1e-6, f"base {base:g}")


def _tables(site: Site, report: Report) -> None:
    with report.check("edit") as check:
        board, random = Board(site.driver), site.random(4)
        n = site.pick(5000, 1100, 40)
        index, value = random.permutation(3 * n)[:n], random.integers(0, 2**31, n)
        edits = np.stack([index, value], 1).astype(np.int32)
        table = board.put(np.zeros(3 * n, np.int32))
        grid = (-(-n // specs.STRETCH), 1, 1)
        board.launch(specs.edit(), grid, board.put(edits), table, n)
        expected = np.zeros(3 * n, np.int32)
        expected[index] = value
        check.case(bool((board.get(table, (3 * n,), "i32") == expected).all()), "edits of a table")


def _sampling(site: Site, report: Report) -> None:
    """Every setting on rows of every kind: the host's tokens, together and alone."""
    n, n_seeds = site.pick((128_256, 5), (5000, 2), (300, 1))
    rows = [logits_of(kind, n, 1) for kind in KINDS]
    tried = Tried(site.driver, rows, len(rows))
    with report.check("sampling") as check:
        for settings in SETTINGS:
            given = params(**settings)
            for seed in range(n_seeds):
                draws = [make_drafter(given, seed)(row, HISTORY, 0) for row in range(len(rows))]
                found = tried(draws)
                for kind, logits, draw, token in zip(KINDS, rows, draws, found, strict=True):
                    expected = make_sampler(given, seed, n)(logits, HISTORY, 0).token
                    check.case(token == expected, f"{kind}, {settings}, seed {seed}: {token}, not {expected}")
                    check.case(tried([draw]) == [token], f"{kind}, {settings}, seed {seed}: another token alone")


def _products(
    board: Board,
    random: np.random.Generator,
    form: str,
    matrix: Matrix,
    stored: NDArray[np.float64],
    rows: tuple[int, ...],
    within: Callable[[str, float, float, str], None],
) -> None:
    """Every tile, with a bias, with a sum, with a scale. The error is relative to the sizes of what is added."""
    shape = stored.shape
    bias = random.standard_normal(shape[0], np.float32)
    sampled = np.unique(np.concatenate([np.arange(min(shape[0], 256)), np.arange(shape[0] - 64, shape[0]).clip(0)]))
    for n in rows:
        x, into = (random.standard_normal((n, width), np.float32) for width in (shape[1], shape[0]))
        wide = as_stored(x, form)
        plain, sizes = wide @ stored[sampled].T, np.abs(wide) @ np.abs(stored[sampled]).T
        what = f"{shape[0]}x{shape[1]}, {n} rows"
        found = board.linear(matrix, x, spare=5)[:, sampled]
        within("error", relative(found, plain, sizes), SUM[form], what)
        found = board.linear(matrix, x, bias, into, 0.25)[:, sampled]
        expected = 0.25 * plain + bias[sampled] + into[:, sampled]
        sizes = 0.25 * sizes + np.abs(bias[sampled]) + np.abs(into[:, sampled])
        within("error", relative(found, expected, sizes), SUM[form], f"{what}, with a bias and a sum")


def _gated(
    board: Board, random: np.random.Generator, matrix: Matrix, rows: tuple[int, ...], case: Callable[[bool, str], None]
) -> None:
    """A product that is gated has the bits of a product, and a gate after it."""
    form = matrix.form
    for n in rows if Gating.fits(matrix) else ():
        x = random.standard_normal((n, matrix.depth), np.float32)
        gate, up = (np.ascontiguousarray(part) for part in np.split(board.linear(matrix, x, scale=0.01), 2, 1))
        expected = board.gate("silu", form, gate, up, specs.GATE_SCALE[form])
        found = board.gated(matrix, x, "silu", form, 0.01, specs.GATE_SCALE[form])
        case(found.tobytes() == expected.tobytes(), f"{matrix.n_rows}x{matrix.depth}, {n} rows: gated")
