"""A driver whose device is the host: kernels run in Triton's interpreter, one program after the other.

Addresses are real addresses of this process. New memory is 0xFF, so what a kernel reads and nobody wrote is a
NaN (or -1). Bytes around each allocation are checked when it is released.
"""

import ctypes
import itertools
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import triton.language as tl
from gpu.support.arithmetic import Builder, install
from gpu.support.recording import ALIGNMENT, Function, RecordingDriver
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

from kvarn.backends.cuda.build import constants
from kvarn.backends.cuda.specs import Kernel

GUARD = 0xA5
SCALARS = {
    "i8": (tl.int8, np.int8),
    "i16": (tl.int16, np.int16),
    "i32": (tl.int32, np.int32),
    "i64": (tl.int64, np.int64),
    "u8": (tl.uint8, np.uint8),
    "u16": (tl.uint16, np.uint16),
    "u32": (tl.uint32, np.uint32),
    "u64": (tl.uint64, np.uint64),
    "fp16": (tl.float16, np.float16),
    "bf16": (tl.bfloat16, np.uint16),
    "fp32": (tl.float32, np.float32),
    "fp64": (tl.float64, np.float64),
}


class Interpreted(Function):
    """A kernel as a Python function, and how its arguments become tensors of the interpreter."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        jit = getattr(import_module(f"kvarn.backends.cuda.kernels.{kernel.name}"), kernel.name)
        wanted = [name for name, _ in (*kernel.arguments, *kernel.constants)]
        assert jit.arg_names == wanted, f"{kernel.title}: the function takes {jit.arg_names}, its Kernel has {wanted}"
        self.code = jit.rewrite()
        self.constants = constants(kernel, target=0)
        self.names, self.types = [], []
        for name, kind in kernel.arguments:
            scalar, storage = SCALARS[kind.removeprefix("*")]
            self.names.append(name)
            self.types.append((tl.pointer_type(scalar), np.uint64) if kind[0] == "*" else (scalar, storage))

    def tensors(self, args: Sequence[int | float]) -> dict[str, Any]:
        made = {}
        for name, (kind, storage), value in zip(self.names, self.types, args, strict=True):
            made[name] = tl.tensor(TensorHandle(np.array([value], storage), kind), kind)
        return made


class InterpretingDriver(RecordingDriver):
    def __init__(self, name: str = "Interpreter", target: int = 90, total_bytes: int = 1 << 30) -> None:
        super().__init__(name, target, total_bytes)
        self.builder: Builder = install()
        self.order: np.random.Generator | None = None  # programs run in a random order, or one after the other
        self._buffers: dict[int, NDArray[np.uint8]] = {}  # each with ALIGNMENT bytes before and after

    def view(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The device's memory as an array, without a copy."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._check(address, nbytes)
        return self._bytes(address, nbytes).view(dtype).reshape(shape)

    def check(self) -> None:
        """No byte around an allocation has changed."""
        for address in self._buffers:
            self._check_guards(address)

    def _bytes(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def _allocate(self, nbytes: int) -> int:
        buffer = np.full(nbytes + 3 * ALIGNMENT, GUARD, np.uint8)
        address = -(-buffer.ctypes.data // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._buffers[address] = buffer
        self._bytes(address, nbytes)[...] = 0xFF
        return address

    def _release(self, address: int) -> None:
        self._check_guards(address)
        del self._buffers[address]

    def _check_guards(self, address: int) -> None:
        buffer, nbytes = self._buffers[address], self.live[address]
        first = address - buffer.ctypes.data
        for where, guard in (("before", buffer[:first]), ("after", buffer[first + nbytes :])):
            assert (guard == GUARD).all(), f"bytes {where} the {nbytes} bytes at {address:#x} have changed"

    def _write(self, address: int, data: NDArray[Any]) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def _read(self, address: int, out: NDArray[Any]) -> None:
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def _load(self, kernel: Kernel) -> Function:
        return Interpreted(kernel)

    def _run(self, function: Function, grid: tuple[int, int, int], args: Sequence[int | float]) -> None:
        assert isinstance(function, Interpreted)
        tensors = function.tensors(args) | function.constants
        self.builder.memory = self
        self.builder.set_grid_dim(*grid)
        with np.errstate(all="ignore"), warnings.catch_warnings():  # lanes that no one stores may compute anything
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            programs = list(itertools.product(*map(range, grid)))
            if self.order is not None:
                self.order.shuffle(programs)
            for self.builder.grid_idx in programs:
                function.code(**tensors)
