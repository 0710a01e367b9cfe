"""Products of rows and matrices: which tile, how many splits, and the memory in which splits leave their sums.

The splits of a matrix's depth follow from its shape and type alone (tiling.splits_of), because they are a part of
the arithmetic. The tile follows from the number of rows, and has no effect on a bit.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvarn.backends.cuda import specs, tiling
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.weights import Matrix
from kvarn.cache.spec import ceil_div


class Gating(NamedTuple):
    """What becomes of a product of gate and up, which are stored one after the other."""

    activation: int  # specs.ACTIVATION_CODES
    form: int  # of the output, specs.FORM_CODES
    factor: float

    @staticmethod
    def fits(matrix: Matrix) -> bool:
        return matrix.splits == 1 and matrix.n_rows % (2 * specs.GATED_MULTIPLE) == 0


class Products:
    """Products of one stream. `reserve` comes before the first launch."""

    def __init__(self, driver: Device) -> None:
        self._driver = driver
        self._partial: Allocation | None = None  # [tile, split, row, column], f32
        self._counters: Allocation | None = None  # a zero per tile

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in (self._partial, self._counters) if memory is not None)

    def reserve(self, matrices: Iterable[Matrix]) -> None:
        """Memory for products of these matrices with any number of rows."""
        split = [matrix for matrix in matrices if matrix.splits > 1]
        if not split:
            return
        rows = tiling.SHARED_ROWS
        partial = max(4 * rows * matrix.padded * matrix.splits for matrix in split)
        tiles = max(matrix.padded for matrix in split) // tiling.NARROWEST
        self._partial = Allocation(self._driver, partial)
        self._counters = Allocation(self._driver, 4 * tiles * (rows // tiling.F32_TILE.rows))
        self._driver.fill(self._counters.address, 0, self._counters.nbytes)

    def launch(
        self,
        x: int,
        matrix: Matrix,
        out: int,
        out_stride: int,
        n_rows: int,
        bias: int = 0,
        adds: int = 0,
        scale: float = 1.0,
        gate: Gating | None = None,
        tiled: tuple[tiling.Tile, str] | None = None,
    ) -> None:
        """out = scale x matrix + bias, or out += the same, or what a gate makes of the product. x, out and bias are
        addresses; a bias may be 0. The tile follows from the number of rows, if it is not given."""
        if not n_rows:
            return
        tile, mode = tiled or tiling.tile_for(matrix.kind, n_rows, matrix.n_rows, matrix.splits)
        n_tiles = ceil_div(matrix.n_rows, tile.columns) * ceil_div(n_rows, tile.rows)
        grid = (n_tiles, matrix.splits if mode == "shared" else 1, 1)
        partial, counters = (0 if memory is None else memory.address for memory in (self._partial, self._counters))
        places: tuple[int, ...]
        sizes: tuple[int, ...]
        if matrix.planes is None:
            kernel, steps = specs.linear(matrix.form, tile, mode), matrix.depth // tiling.DEPTH
            places, sizes = (matrix.address,), (matrix.depth,)
        else:
            kernel, steps = specs.linear_packed(matrix.planes, tile, mode), matrix.units
            places, sizes = (matrix.address, matrix.headers), (matrix.padded, matrix.depth, matrix.units)
        end = (out_stride, scale * matrix.scale, int(bias != 0), adds, matrix.splits)
        apart = mode == "shared" and matrix.splits > 1 and n_rows > tiling.APART_ROWS
        gating = (0, 0, 0, 0.0) if gate is None else (gate.activation, matrix.n_rows // 2, gate.form, gate.factor)
        args = (
            *(x, *places, bias, out, partial, counters, n_rows, matrix.n_rows, *sizes),
            *(*end, ceil_div(steps, matrix.splits), int(apart), *gating),
        )
        self._driver.launch(self._driver.function(kernel), grid, args)
        if apart:
            grid = (n_rows, ceil_div(matrix.n_rows, specs.STRETCH), 1)
            args = (partial, bias, out, n_rows, matrix.n_rows, *end, tile.rows, tile.columns)
            self._driver.launch(self._driver.function(specs.total()), grid, args)
