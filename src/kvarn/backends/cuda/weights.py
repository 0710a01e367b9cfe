"""Weights on the device.

Matrices keep the type of their file if it is F32, F16 or BF16. Common quantized types are packed
(planes.py). Every other type is widened to f16, which rounds a quantized weight eight times finer than
bf16. The matrices that read one input lie one after another, so that one product computes them all. Rows
are padded to a multiple of DEPTH numbers (packed ones to whole units) and matrices to a multiple of
COLUMNS rows, with zeros, so a kernel reads whole tiles. Vectors (norms and biases) are f32.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn import native
from kvarn.arrays import Bytes
from kvarn.backends.cuda import pack
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.planes import GROUP, PACKED, Planes
from kvarn.backends.cuda.specs import AS_STORED, COLUMNS, DEPTH, TYPE_BYTES, form_of, product_of, splits_of
from kvarn.cache.spec import align
from kvarn.loading.checkpoint import Checkpoint, Encoded
from kvarn.loading.progress import Progress
from kvarn.loading.quants import dequantize

LARGEST_F16 = np.float32(65504)
CHUNK = 64 << 20  # bytes of f32 that are widened at a time


PACK_CHUNK = 1 << 20  # numbers that a thread packs at a time
PACKERS = 16  # threads


@dataclass(frozen=True, slots=True)
class Matrix:
    form: str  # of its inputs, and of itself if it is not packed
    memory: Allocation
    n_rows: int  # numbers of an output
    depth: int  # numbers of an input, with the padding
    planes: Planes | None = None
    units: int = 0  # of a row, if it is packed
    scale: float = 1.0  # what its numbers are multiplied by, a power of two

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def padded(self) -> int:
        """Rows in memory."""
        return align(self.n_rows, COLUMNS)

    @property
    def headers(self) -> int:
        """The address of the second plane."""
        assert self.planes is not None
        return self.address + self.planes.code_bytes(self.padded, self.units * self.planes.unit)

    @property
    def splits(self) -> int:
        """Parts of the depth that are summed up by themselves."""
        return splits_of(self.n_rows, self.depth, self.planes is not None)

    @property
    def kind(self) -> str:
        """Which tiles its products have: its form, or `packed`."""
        return self.form if self.planes is None else "packed"


class Weights:
    """Loads a tensor when the program first asks for it."""

    def __init__(self, driver: Device, checkpoint: Checkpoint, n_tensors: int, progress: Progress) -> None:
        self._driver = driver
        self._checkpoint = checkpoint
        self._types = {info.name: info.type for info in checkpoint.infos}
        self._matrices: dict[tuple[str, ...], Matrix] = {}
        self._vectors: dict[tuple[str | None, ...], Allocation] = {}
        self._seen: set[str] = set()
        self._progress, self._n_tensors = progress, n_tensors
        progress("loading", 0, n_tensors)

    @property
    def nbytes(self) -> int:
        matrices = sum(matrix.memory.nbytes for matrix in self._matrices.values())
        return matrices + sum(vector.nbytes for vector in self._vectors.values())

    @property
    def matrices(self) -> list[Matrix]:
        """All that are loaded."""
        return list(self._matrices.values())

    def form(self, name: str) -> str:
        """Of the inputs of a matrix."""
        return form_of(self._types[name])

    def product(self, name: str) -> str:
        """Matrices for which this is equal can be one product."""
        return product_of(self._types[name])

    def matrix(self, *names: str) -> Matrix:
        """These matrices, which can be one product, one after another."""
        if names not in self._matrices:
            load = self._pack if self._types[names[0]] in PACKED else self._load
            self._matrices[names] = load(names)
            self._loaded(*names)
        return self._matrices[names]

    def vector(self, name: str) -> int:
        return self.vectors((name, self._checkpoint.shapes[name][0]))

    def vectors(self, *parts: tuple[str | None, int]) -> int:
        """The address of these vectors, one after another. One without a name is zero."""
        key = tuple(name for name, _ in parts)
        if key not in self._vectors:
            numbers = [
                np.zeros(length, np.float32) if name is None else self._checkpoint.tensor(name)
                for name, length in parts
            ]
            data = np.ascontiguousarray(np.concatenate(numbers), np.float32)
            self._vectors[key] = Allocation(self._driver, data.nbytes)
            self._driver.upload(self._vectors[key].address, data)
            self._loaded(*(name for name in key if name is not None))
        return self._vectors[key].address

    def _load(self, names: tuple[str, ...]) -> Matrix:
        form = self.form(names[0])
        shapes = [self._checkpoint.shapes[name] for name in names]
        width, depth = shapes[0][-1], align(shapes[0][-1], DEPTH)
        n_rows = sum(shape[0] for shape in shapes)
        row_bytes = depth * TYPE_BYTES[form]
        memory = Allocation(self._driver, align(n_rows, COLUMNS) * row_bytes)
        self._driver.fill(memory.address, 0, memory.nbytes)
        at = memory.address
        for name in names:
            for rows in self._chunks(name, form, width):
                if width != depth:
                    rows = np.pad(rows, ((0, 0), (0, depth - width)))
                self._driver.upload(at, np.ascontiguousarray(rows))
                at += rows.nbytes
        return Matrix(form, memory, n_rows, depth)

    def _pack(self, names: tuple[str, ...]) -> Matrix:
        stored = [self._checkpoint.encoded(name) for name in names]
        planes, width = PACKED[stored[0].type], stored[0].shape[-1]
        power = pack.shift(max(pack.peak(each.rows, each.type) for each in stored))
        n_rows, units = sum(len(each.rows) for each in stored), planes.units(width)
        memory = Allocation(self._driver, align(n_rows, COLUMNS) * planes.row_bytes(width))
        matrix = Matrix("f16", memory, n_rows, align(width, DEPTH), planes, units, 2.0**-power)
        self._driver.fill(memory.address, 0, memory.nbytes)
        headers = np.zeros((units, planes.words, matrix.padded), np.uint32)
        step = align(max(1, PACK_CHUNK // width), GROUP)
        at, starts = memory.address, range(0, n_rows, step)

        def packed(start: int) -> NDArray[np.uint16]:
            parts = [pack.packed(rows, kind, power) for rows, kind in _slice(stored, start, start + step)]
            words = np.concatenate([words for _, words in parts])
            headers[:, :, start : start + len(words)] = words.transpose(1, 2, 0)
            return pack.grouped(np.concatenate([tiles for tiles, _ in parts]))

        with ThreadPoolExecutor(PACKERS) as threads:
            for tiles in threads.map(packed, starts):
                self._driver.upload(at, tiles)
                at += tiles.nbytes
        self._driver.upload(matrix.headers, headers)
        return matrix

    def _chunks(self, name: str, form: str, width: int) -> Any:
        stored = self._checkpoint.encoded(name)
        step = max(1, CHUNK // (4 * width))
        for start in range(0, len(stored.rows), step):
            rows = stored.rows[start : start + step]
            if stored.type in AS_STORED:
                yield np.ascontiguousarray(rows).view(np.uint32 if form == "f32" else np.uint16)
            else:
                yield _f16(dequantize(rows, stored.type, (len(rows), width)))

    def _loaded(self, *names: str) -> None:
        self._seen.update(names)
        self._progress("loading", len(self._seen), self._n_tensors)


def _slice(stored: Sequence[Encoded], start: int, stop: int) -> Iterator[tuple[Bytes, str]]:
    """Some rows of matrices one after another, with their types."""
    for each in stored:
        if stop > 0 and start < len(each.rows):
            yield each.rows[max(start, 0) : stop], each.type
        start, stop = start - len(each.rows), stop - len(each.rows)


def _f16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded. A finite number that is too large becomes the largest one, as inputs do (kernels/form.py)."""
    if not (np.abs(x) <= LARGEST_F16).all():
        x = np.where(np.isfinite(x), np.clip(x, -LARGEST_F16, LARGEST_F16), x)
    out = np.empty(x.shape, np.uint16)
    native.encode_f16(np.ascontiguousarray(x), out)
    return out
