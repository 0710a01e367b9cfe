"""One kernel on arrays of the host: they are stored as the backend stores them, and what no kernel may read is NaN.

A row of f32 has `spare` NaNs behind it. Rows of a matrix's form are padded with zeros to a multiple of
DEPTH, as the backend pads them. It needs neither Triton nor pytest: bench/gpu_proof.py uses it on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.support.blocks import planes_of
from numpy.typing import NDArray

from kvarn.backends.cuda import specs, tiling
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.planes import expanded
from kvarn.backends.cuda.products import Gating, Products
from kvarn.backends.cuda.specs import Kernel
from kvarn.backends.cuda.weights import Matrix
from kvarn.cache.spec import align, ceil_div

FORMS = tuple(specs.TYPE_BYTES)
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # half a unit in the last place, relative
Array = NDArray[Any]


def encoded(x: Array, form: str) -> Array:
    """Numbers in a form, rounded half to even."""
    x = np.ascontiguousarray(x, np.float32)
    if form != "bf16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16 if form == "f16" else np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def decoded(x: Array, form: str) -> NDArray[np.float64]:
    return (
        (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if form == "bf16"
        else x.astype(np.float64)
    )


def as_stored(x: Array, form: str) -> NDArray[np.float64]:
    """What is left of numbers after they were rounded to a form."""
    return decoded(encoded(x, form), form)


def widened(x: Array, width: int, value: float = np.nan) -> Array:
    """Rows with `value` behind them, up to `width` numbers."""
    return np.pad(np.asarray(x, np.float32), ((0, 0), (0, width - x.shape[1])), constant_values=value)


class Board:
    """Arrays on the device, as long as the board lives."""

    def __init__(self, driver: Device) -> None:
        driver.bind()
        self.driver = driver
        self._held: list[Allocation] = []

    def put(self, x: Array) -> int:
        address = self.room(x.nbytes)
        self.driver.upload(address, np.ascontiguousarray(x))
        return address

    def room(self, nbytes: int, byte: int = 0xFF) -> int:
        """Memory whose bytes are 0xFF: a NaN in every form."""
        self._held.append(Allocation(self.driver, nbytes))
        self.driver.fill(self._held[-1].address, byte, nbytes)
        return self._held[-1].address

    def get(self, address: int, shape: tuple[int, ...], form: str) -> Array:
        found = np.empty(shape, {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32}[form])
        self.driver.download(address, found)
        return found

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], *args: int | float) -> None:
        self.driver.launch(self.driver.function(kernel), grid, args)

    def rows(self, kernel: Kernel, n_rows: int, width: int, *args: int | float) -> None:
        """A program per row and stretch of columns."""
        self.launch(kernel, (n_rows, ceil_div(width, specs.STRETCH), 1), *args)

    # -- kernels over rows -----------------------------------------------------------------------------------------

    def embed(
        self, form: str, tokens: Sequence[int], weight: Array, scale: float = 1.0, sampled: Sequence[int] = (0,)
    ) -> Array:
        width, stride = weight.shape[1], align(weight.shape[1], tiling.DEPTH)
        ids = (self.put(np.array(each, np.int32)) for each in (tokens, sampled))
        given = *ids, self.put(encoded(widened(weight, stride), form))
        out = self.room(4 * len(tokens) * width)
        self.rows(specs.embed(), len(tokens), width, *given, out, width, stride, scale, specs.FORM_CODES[form])
        return self.get(out, (len(tokens), width), "f32")

    def norm(self, form: str, x: Array, weight: Array, eps: float, spare: int = 0) -> Array:
        """With the padding, which the kernel leaves as it is: zero."""
        (n, width), stride = x.shape, x.shape[1] + spare
        out_stride = align(width, tiling.DEPTH)
        out = self.room(n * out_stride * specs.TYPE_BYTES[form], 0)
        args = (self.put(widened(x, stride)), self.put(weight), out, width, stride, out_stride, eps)
        self.launch(specs.norm(), (n, 1, 1), *args, specs.FORM_CODES[form])
        return self.get(out, (n, out_stride), form)

    def norm_add(self, x: Array, weight: Array, into: Array, eps: float, spare: int = 0) -> Array:
        (n, width), stride = x.shape, x.shape[1] + spare
        out = self.put(widened(into, width + 2 * spare))
        args = (self.put(widened(x, stride)), self.put(weight), out, width, stride, width + 2 * spare, eps)
        self.launch(specs.norm_add(), (n, 1, 1), *args)
        return self.get(out, (n, width + 2 * spare), "f32")[:, :width]

    def add(self, x: Array, into: Array, spare: int = 0) -> Array:
        (n, width), stride = x.shape, x.shape[1] + spare
        out = self.put(widened(into, width + 2 * spare))
        self.rows(specs.add(), n, width, self.put(widened(x, stride)), out, width, stride, width + 2 * spare)
        return self.get(out, (n, width + 2 * spare), "f32")[:, :width]

    def select(self, form: str, rows: Sequence[int], x: Array, spare: int = 0) -> Array:
        """With the padding, which the kernel leaves as it is: zero."""
        width, stride, out_stride = x.shape[1], x.shape[1] + spare, align(x.shape[1], tiling.DEPTH)
        out = self.room(len(rows) * out_stride * specs.TYPE_BYTES[form], 0)
        given = self.put(np.array(rows, np.int32)), self.put(widened(x, stride))
        code = specs.FORM_CODES[form]
        self.rows(specs.select(), len(rows), width, *given, out, width, stride, out_stride, code)
        return self.get(out, (len(rows), out_stride), form)

    def gate(self, activation: str, form: str, gate: Array, up: Array, scale: float = 1.0, spare: int = 0) -> Array:
        (n, width), stride, out_stride = gate.shape, gate.shape[1] + spare, align(gate.shape[1], tiling.DEPTH)
        out = self.room(n * out_stride * specs.TYPE_BYTES[form], 0)
        given = self.put(widened(gate, stride)), self.put(widened(up, width + 2 * spare))
        strides, code = (stride, width + 2 * spare, out_stride), specs.ACTIVATION_CODES[activation]
        self.rows(specs.gate(), n, width, *given, out, width, *strides, scale, code, specs.FORM_CODES[form])
        return self.get(out, (n, out_stride), form)

    def angles(self, positions: Sequence[int], turns: Array, magnitude: float = 1.0) -> tuple[Array, Array]:
        shape = (len(positions), len(turns))
        cos, sin = (self.room(4 * shape[0] * shape[1]) for _ in range(2))
        given = self.put(np.array(positions, np.int32)), self.put(np.asarray(turns, np.float64))
        self.launch(specs.angles(), (shape[0], 1, 1), *given, cos, sin, shape[1], magnitude)
        return self.get(cos, shape, "f32"), self.get(sin, shape, "f32")

    # -- products --------------------------------------------------------------------------------------------------

    def matrix(self, form: str, weight: Array) -> Matrix:
        """Padded rows are NaN: what they give is not stored."""
        n, depth = align(weight.shape[0], specs.COLUMNS), align(weight.shape[1], tiling.DEPTH)
        memory = Allocation(self.driver, n * depth * specs.TYPE_BYTES[form])
        self.driver.fill(memory.address, 0xFF, memory.nbytes)
        self.driver.upload(memory.address, encoded(widened(weight, depth, 0.0), form))
        return Matrix(form, memory, weight.shape[0], depth)

    def packed(self, type_name: str, rows: Array, width: int) -> tuple[Matrix, Array]:
        """Blocks of a file as a matrix, and its numbers. Rows that pad it, and their headers, are NaN."""
        planes, power, codes, headers = planes_of(type_name, rows)
        n, units = align(len(rows), specs.COLUMNS), planes.units(width)
        memory = Allocation(self.driver, n * planes.row_bytes(width))
        matrix = Matrix("f16", memory, len(rows), align(width, tiling.DEPTH), planes, units, 2.0**-power)
        self.driver.fill(memory.address, 0xFF, memory.nbytes)
        self.driver.upload(memory.address, codes)
        words = np.full((units, planes.words, n), 0xFFFFFFFF, np.uint32)
        words[..., : len(rows)] = headers[..., : len(rows)]
        self.driver.upload(matrix.headers, words)
        return matrix, expanded(planes, codes, headers)[: len(rows), :width].astype(np.float64) * matrix.scale

    def embed_packed(
        self, matrix: Matrix, tokens: Sequence[int], width: int, scale: float = 1.0, sampled: Sequence[int] = (0,)
    ) -> Array:
        planes = matrix.planes
        out = self.room(4 * len(tokens) * width)
        shape = (planes.bits, planes.field, int(planes.offsets), planes.blocks, planes.span, planes.tiles, planes.words)
        ids = (self.put(np.array(each, np.int32)) for each in (tokens, sampled))
        places = (*ids, matrix.address, matrix.headers, out)
        sizes = (width, matrix.padded, matrix.units)
        self.rows(specs.embed_packed(), len(tokens), width, *places, *sizes, *shape, scale * matrix.scale)
        return self.get(out, (len(tokens), width), "f32")

    def gated(self, matrix: Matrix, x: Array, activation: str, form: str, scale: float, factor: float) -> Array:
        """A product of gate and up, with the padding, which the kernel leaves as it is: zero."""
        n, stride = len(x), align(matrix.n_rows // 2, tiling.DEPTH)
        out = self.room(n * stride * specs.TYPE_BYTES[form], 0)
        gate = Gating(specs.ACTIVATION_CODES[activation], specs.FORM_CODES[form], factor)
        Products(self.driver).launch(self._inputs(matrix, x), matrix, out, stride, n, scale=scale, gate=gate)
        return self.get(out, (n, stride), form)

    def _inputs(self, matrix: Matrix, x: Array) -> int:
        """Rows of x behind the last one, up to a whole tile, are NaN."""
        rows = np.full((align(len(x), specs.ROWS), matrix.depth), np.nan, np.float32)
        rows[: len(x)] = widened(x, matrix.depth, 0.0)
        return self.put(encoded(rows, matrix.form))

    def linear(
        self,
        matrix: Matrix,
        x: Array,
        bias: Array | None = None,
        into: Array | None = None,
        scale: float = 1.0,
        spare: int = 0,
    ) -> Array:
        n, stride = len(x), matrix.n_rows + spare
        out = self.room(4 * n * stride) if into is None else self.put(widened(into, stride))
        added = 0 if bias is None else self.put(np.asarray(bias, np.float32))
        given = self._inputs(matrix, x)
        products = Products(self.driver)
        products.reserve([matrix])
        products.launch(given, matrix, out, stride, n, added, int(into is not None), scale)
        found = self.get(out, (n, stride), "f32")
        assert np.isnan(found[:, matrix.n_rows :]).all(), "a product wrote behind its columns"
        return found[:, : matrix.n_rows]
