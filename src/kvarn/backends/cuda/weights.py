"""Weights on the device.

Matrices keep the type of their file if it is F32, F16 or BF16. Common quantized types are packed
(planes.py). Every other type is widened to f16, which rounds a quantized weight eight times finer than
bf16. The matrices that read one input lie one after another, so that one product computes them all. Rows
are padded to a multiple of DEPTH numbers (packed ones to whole units) and matrices to a multiple of
COLUMNS rows, with zeros, so a kernel reads whole tiles. Vectors (norms and biases) are f32.

Threads read, widen and pack (staging.py), and copies run meanwhile: weights are there after `finish`.
They read packed types twice: the largest scale of a matrix comes first.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvarn import native
from kvarn.arrays import Bytes, Floats
from kvarn.backends.cuda import staging
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.planes import GROUP, PACKED, Planes, peak, shift
from kvarn.backends.cuda.specs import AS_STORED, COLUMNS, TYPE_BYTES, form_of, product_of
from kvarn.backends.cuda.tiling import DEPTH, splits_of
from kvarn.cache.spec import align
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.progress import Progress
from kvarn.loading.quants import dequantize

LARGEST_F16 = np.float32(65504)
PACK_CHUNK = 1 << 21  # numbers that a thread packs at a time


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
        self._staging = staging.Staging(driver)
        self._peaks = {
            info.name: self._staging.call(partial(self._peak, info.name))
            for info in checkpoint.infos
            if info.type in PACKED and len(info.shape) > 1
        }
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

    def finish(self) -> None:
        """Wait until everything that was asked for is on the device. Nothing is loaded after it."""
        self._staging.finish()

    def close(self) -> None:
        """End the threads, also of loading that failed."""
        self._staging.close()

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

    def tensor(self, name: str) -> Floats:
        """On the host."""
        return np.ascontiguousarray(self._checkpoint.tensor(name))

    def vector(self, name: str) -> int:
        return self.vectors((name, self._checkpoint.shapes[name][0]))

    def vectors(self, *parts: tuple[str | None, int]) -> int:
        """The address of these vectors, one after another. One without a name is zero."""
        key = tuple(name for name, _ in parts)
        if key not in self._vectors:
            memory = self._vectors[key] = Allocation(self._driver, 4 * sum(length for _, length in parts))
            self._staging.put(memory.address, memory.nbytes, partial(self._read_vectors, parts))
            self._loaded(*(name for name in key if name is not None))
        return self._vectors[key].address

    def _read_vectors(self, parts: Sequence[tuple[str | None, int]], out: Bytes) -> None:
        numbers, at = out.view(np.float32), 0
        for name, length in parts:
            numbers[at : at + length] = 0 if name is None else self._checkpoint.tensor(name)
            at += length

    def _load(self, names: tuple[str, ...]) -> Matrix:
        form, width = self.form(names[0]), self._checkpoint.shapes[names[0]][-1]
        depth = align(width, DEPTH)
        n_rows, row_bytes = sum(self._checkpoint.shapes[name][0] for name in names), depth * TYPE_BYTES[form]
        matrix = Matrix(form, self._zeros(align(n_rows, COLUMNS) * row_bytes), n_rows, depth)
        step, at = max(1, staging.PIECE // row_bytes), matrix.address
        for name in names:
            n = self._checkpoint.shapes[name][0]
            for start in range(0, n, step):
                nbytes = min(step, n - start) * row_bytes
                self._staging.put(at, nbytes, partial(self._read_rows, name, start, row_bytes))
                at += nbytes
        return matrix

    def _read_rows(self, name: str, start: int, row_bytes: int, out: Bytes) -> None:
        """Rows of a matrix that is not packed, as the device has them: each with zeros behind it."""
        stored, width, rows = self._types[name], self._checkpoint.shapes[name][-1], out.reshape(-1, row_bytes)
        if stored in AS_STORED and ENCODINGS[stored].row_bytes(width) == row_bytes:
            self._checkpoint.read_rows(name, start, rows)
            return
        found = self._stored(name, start, len(rows))
        if stored not in AS_STORED:
            found = _f16(dequantize(found, stored, (len(rows), width))).view(np.uint8)
        rows[:, : found.shape[1]] = found
        rows[:, found.shape[1] :] = 0

    def _pack(self, names: tuple[str, ...]) -> Matrix:
        shapes = [self._checkpoint.shapes[name] for name in names]
        planes, width = PACKED[self._types[names[0]]], shapes[0][-1]
        power = shift(max(self._peaks[name].result() for name in names))
        n_rows, units = sum(shape[0] for shape in shapes), planes.units(width)
        memory = self._zeros(align(n_rows, COLUMNS) * planes.row_bytes(width))
        matrix = Matrix("f16", memory, n_rows, align(width, DEPTH), planes, units, 2.0**-power)
        headers = np.zeros((units, planes.words, matrix.padded), np.uint32)
        step, row_bytes = align(max(1, PACK_CHUNK // width), GROUP), planes.code_bytes(1, width)
        packed: list[Future[None]] = []

        def fill_codes(start: int, done: Future[None], out: Bytes) -> None:
            try:
                codes, row = out.view(np.uint16).reshape(-1, units, planes.tiles, GROUP, planes.span), 0
                codes[-1] = 0  # some of its rows may be missing
                for name, first, n in _slice(names, shapes, start, start + step):
                    rows = self._stored(name, first, n)
                    native.pack_planes(self._types[name], rows, power, codes, row, headers, start + row)
                    row += n
            finally:
                done.set_result(None)

        def fill_headers(start: int, out: Bytes) -> None:
            wait(packed)  # threads began with them earlier
            out[...] = headers.view(np.uint8).reshape(-1)[start : start + len(out)]

        for start in range(0, n_rows, step):
            packed.append(Future())
            nbytes = min(step, align(n_rows - start, GROUP)) * row_bytes
            self._staging.put(matrix.address + start * row_bytes, nbytes, partial(fill_codes, start, packed[-1]))
        for start in range(0, headers.nbytes, staging.PIECE):
            nbytes = min(staging.PIECE, headers.nbytes - start)
            self._staging.put(matrix.headers + start, nbytes, partial(fill_headers, start))
        return matrix

    def _peak(self, name: str) -> float:
        n, width = self._checkpoint.shapes[name]
        step = max(1, PACK_CHUNK // width)
        parts = ((start, min(step, n - start)) for start in range(0, n, step))
        return max(peak(self._stored(name, *part), self._types[name]) for part in parts)

    def _stored(self, name: str, start: int, n: int) -> Bytes:
        """Some rows as they are in the file."""
        found = np.empty((n, ENCODINGS[self._types[name]].row_bytes(self._checkpoint.shapes[name][-1])), np.uint8)
        self._checkpoint.read_rows(name, start, found)
        return found

    def _zeros(self, nbytes: int) -> Allocation:
        memory = Allocation(self._driver, nbytes)
        self._driver.fill(memory.address, 0, nbytes)
        return memory

    def _loaded(self, *names: str) -> None:
        self._seen.update(names)
        self._progress("loading", len(self._seen), self._n_tensors)


def _slice(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], start: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    """Some rows of matrices one after another: the name of each, its first row, and how many."""
    for name, (n, *_) in zip(names, shapes, strict=True):
        if stop > 0 and start < n:
            first = max(start, 0)
            yield name, first, min(stop, n) - first
        start, stop = start - n, stop - n


def _f16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded. A finite number that is too large becomes the largest one, as inputs do (kernels/form.py)."""
    if not (np.abs(x) <= LARGEST_F16).all():
        x = np.where(np.isfinite(x), np.clip(x, -LARGEST_F16, LARGEST_F16), x)
    out = np.empty(x.shape, np.uint16)
    native.encode_f16(np.ascontiguousarray(x), out)
    return out
