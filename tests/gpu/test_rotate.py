"""The kernel `rotate`: norms and rotation of queries and keys, and the write into the cells."""

from dataclasses import dataclass

import numpy as np
import pytest
from gpu.support import oracle
from gpu.support.launching import ROUNDOFF, Array, Board, as_stored, decoded, encoded
from gpu.support.oracle import relative

from kvarn.backends.cuda import specs

EPS = 1e-5
BLOCK, N_BLOCKS, SPARE = 16, 3, 8
CELLS = [5, 40, -1, 17]  # a token in every block, and one that is not stored
FORMS = ("f32", "f16", "bf16")


@dataclass
class Case:
    """Heads of a step: q, k and v lie in rows that have NaNs behind them."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 24
    half: int = 12
    copies: int = 1
    normed: bool = True
    centred: bool = False

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.dim, self.half, *self.heads])
        n = len(CELLS)
        self.q, self.k, self.v = (random.standard_normal((n, h, self.dim), np.float32) for h in (4, 2, 2))
        self.norms = random.standard_normal((2, self.dim), np.float32)
        self.centre = random.standard_normal((2, self.dim), np.float32)
        angles = random.uniform(0, 7, (n, max(self.half, 1))).astype(np.float32)
        self.cos, self.sin = np.cos(angles)[:, : self.half], np.sin(angles)[:, : self.half]

    def run(self, driver, codec: str) -> tuple[Array, Array, Array]:
        """Queries [T, heads, dim] and cells of K and V [block, head, slot, dim]; NaN where nothing was written."""
        board, dim, size = Board(driver), self.dim, encoded(np.zeros(1), codec).itemsize
        stored = (N_BLOCKS, 2 * self.copies, BLOCK, dim)
        q_out, *cells = (board.room(int(np.prod(shape)) * size) for shape in (self.q.shape, stored, stored))
        given = [np.pad(x.reshape(len(x), -1), ((0, 0), (0, SPARE)), constant_values=np.nan) for x in self._qkv]
        norms = [board.put(x) if self.normed else 0 for x in self.norms]
        centre = board.put(self.centre) if self.centred else 0
        turns = [board.put(x) if self.half else 0 for x in (self.cos, self.sin)]
        rows = (2 * self.copies * BLOCK, BLOCK, 1)
        board.launch(
            specs.rotate(codec),
            (len(CELLS), self.heads[0] + 2 * self.heads[1], 1),
            *map(board.put, given),
            *(x.shape[1] for x in given),
            *(*norms, centre, *turns, board.put(np.array(CELLS, np.int32)), q_out, *cells),
            *(*self.heads, self.copies, dim, self.half, BLOCK),
            *(*rows, int(self.normed), int(self.normed), int(self.centred), EPS),
        )
        shapes = (self.q.shape, stored, stored)
        return tuple(decoded(board.get(a, s, codec), codec) for a, s in zip((q_out, *cells), shapes, strict=True))

    @property
    def _qkv(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v

    def turned(self, x: Array, which: int) -> Array:
        wide = oracle.norm(x, self.norms[which], EPS) if self.normed else x.astype(np.float64)
        return oracle.rotated(wide, self.cos, self.sin) if self.half else wide

    def check_cells(self, found: Array, expected: Array, limit: float, sizes: Array) -> None:
        written = np.zeros((N_BLOCKS, BLOCK), bool)
        for token, cell in enumerate(CELLS):
            if cell >= 0:
                written[divmod(cell, BLOCK)] = True
                block, slot = divmod(cell, BLOCK)
                for copy in range(self.copies):
                    heads = found[block, copy :: self.copies, slot]
                    assert relative(heads, expected[token], sizes[token]) < limit, (token, copy)
        assert np.isnan(found.swapaxes(1, 2)[~written]).all(), "another cell was written"


CASES = {
    "normed": Case(),
    "no norm": Case(normed=False),
    "partial rotation": Case(dim=32, half=8),
    "no rotation": Case(half=0),
    "head of 8": Case(dim=8, half=4, normed=False),
    "head of 256": Case(dim=256, half=128),
    "head of 96": Case(dim=96, half=48),
    "copies": Case(copies=2),
    "centred": Case(centred=True, copies=2),
}


@pytest.mark.parametrize("codec", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_rotation_and_write(driver, name: str, codec: str) -> None:
    case = CASES[name]
    queries, keys, values = case.run(driver, codec)
    limit = 1.01 * ROUNDOFF[codec] + 1e-6
    expected = case.turned(case.q, 0)
    assert relative(queries, expected, _sizes(expected)) < limit
    expected = case.turned(case.k, 1) - case.centred * case.centre
    case.check_cells(keys, expected, limit, _sizes(expected))
    case.check_cells(values, as_stored(case.v, codec), 1e-30, np.ones(case.v.shape))


def _sizes(x: Array) -> Array:
    """A rotated number is a difference: its error is relative to the largest of its head."""
    return np.broadcast_to(np.abs(x).max(-1, keepdims=True), x.shape)


def test_only_queries_or_only_keys(driver) -> None:
    """As layers.py asks: queries without keys, then keys without queries."""
    queries, keys, values = Case(heads=(4, 0)).run(driver, "bf16")
    assert np.isfinite(queries).all()
    assert np.isnan(keys).all()
    assert np.isnan(values).all()
    queries, keys, _ = Case(heads=(0, 2)).run(driver, "bf16")
    assert np.isnan(queries).all()
    assert np.isfinite(keys).sum() == 3 * 2 * 24, "three tokens of the four have a cell"


@pytest.mark.parametrize("codec", ["f16", "bf16"])
def test_cells_are_the_bits_of_the_reference(driver, codec: str) -> None:
    """Also of numbers that a type does not hold: f16 has infinities from 65,520 on."""
    from kvarn.backends.reference.codecs import DEFINITIONS

    case = Case(half=0, normed=False)
    case.v[0].ravel()[:6] = [65519, 65520, -1e30, 1e-8, 2.0**-25, 1 + ROUNDOFF[codec]]
    values = case.run(driver, codec)[2]
    with np.errstate(over="ignore"):
        cells = DEFINITIONS[codec].encode(np.ascontiguousarray(case.v[0]))
    expected = DEFINITIONS[codec].decode(cells, case.dim).astype(np.float64)
    assert np.array_equal(values[CELLS[0] // BLOCK, :, CELLS[0] % BLOCK], expected)
