"""NVIDIA's driver, as little of it as the backend needs: device, memory, kernels, one stream, events, graphs.

Everything runs on one stream, in order; only the launches of a graph are captured on another one. Addresses
are integers. A Driver belongs to the process that made it: a forked child may not use it, and releases
nothing. Tests put another driver in its place (tests/gpu/support), so nothing else in this backend calls
NVIDIA's functions.
Non-goals: what is computed; where binaries come from (store.py).
"""

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.cuda.probe import version_text
from kvarn.backends.cuda.specs import EARLIEST, EARLY, Kernel
from kvarn.backends.cuda.store import Binary
from kvarn.errors import KvarnError, OutOfMemory

Grid = tuple[int, int, int]
Function = Any  # a loaded kernel
Event = Any
Graph = Any

SMALL_SHARED = 48 << 10  # bytes of shared memory that a kernel may have without asking
BLOCK_SHARED = 1 << 10  # bytes that the device takes for each program
SPREAD = ("linear", "linear_packed")  # kernels whose programs are spread evenly


class Device(Protocol):
    """What the backend asks of a driver."""

    name: str
    target: int  # compute capability, 90 for 9.0
    processors: int
    total_bytes: int
    version: str  # of the driver

    def bind(self) -> None:
        """Make the device current in this thread."""

    def free_bytes(self) -> int: ...

    def allocate(self, nbytes: int) -> int:
        """The address of device memory, whose content is undefined. Raises OutOfMemory."""

    def release(self, address: int) -> None: ...

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory for `send` and `receive`."""

    def upload(self, address: int, data: NDArray[Any]) -> None:
        """Copy to the device and wait."""

    def download(self, address: int, out: NDArray[Any]) -> None:
        """Wait for everything that was launched, then copy to the host."""

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy pinned memory to the device, in the order of the stream, without waiting."""

    def receive(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy to pinned memory, in the order of the stream, without waiting."""

    def fill(self, address: int, byte: int, nbytes: int) -> None: ...

    def load(self, binaries: dict[Kernel, Binary]) -> None:
        """Load kernels. `function` gives them."""

    def function(self, kernel: Kernel) -> Function: ...

    def launch(self, function: Function, grid: Grid, args: Sequence[int | float]) -> None: ...

    def synchronize(self) -> None: ...

    def event(self) -> Event: ...

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Until the work before its last `record` is done."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Milliseconds between two events, after waiting for the second."""

    def capture(self, launches: Callable[[], None]) -> Graph:
        """Record what `launches` does as a graph. It may not allocate, load or wait."""

    def replay(self, graph: Graph) -> None: ...


_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


class LoadedKernel:
    """A kernel in the device's memory, and the ctypes of its arguments."""

    def __init__(self, handle: Any, kernel: Kernel, binary: Binary) -> None:
        self.handle, self.threads, self.shared = handle, 32 * binary.warps, binary.shared
        types = [ctypes.c_void_p if kind[0] == "*" else _TYPES[kind] for _, kind in kernel.arguments]
        scratch = [ctypes.c_void_p] * 2  # two pointers that Triton adds, and that our kernels do not use
        self.types: list[Any] = types + scratch
        self.pointers = ctypes.c_void_p * len(self.types)
        self.early = EARLY in kernel.constants
        self.spread = kernel.name in SPREAD


class Held:
    """An event or a graph, which the driver gives back with this object."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Driver:
    """The first device."""

    def __init__(self) -> None:
        self._api = _bindings()
        api = self._api
        try:
            self._call(api.cuInit(0))
            device = self._call(api.cuDeviceGet(0))
            self._context = self._call(api.cuDevicePrimaryCtxRetain(device))
        except DeviceError as error:
            raise KvarnError(
                f"the NVIDIA device does not start ({error}): is it full, or gone? ask nvidia-smi"
            ) from None
        self._process = os.getpid()
        self.bind()
        self.name = self._call(api.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
        kinds = api.CUdevice_attribute
        major, minor, self.processors, self._shared = (
            int(self._call(api.cuDeviceGetAttribute(kind, device)))
            for kind in (
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )
        )
        self.target = 10 * major + minor
        self.total_bytes = int(self._call(api.cuDeviceTotalMem(device)))
        self.version = version_text(int(self._call(api.cuDriverGetVersion())))
        self._stream = self._call(api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._thread = threading.local()  # `config` of its launches; `stream`: where it captures them
        self._functions: dict[Kernel, LoadedKernel] = {}

    def bind(self) -> None:
        if os.getpid() != self._process:
            raise KvarnError("a forked process cannot use the GPU of its parent: open the model in the child")
        self._call(self._api.cuCtxSetCurrent(self._context))

    # -- memory --------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        return int(self._call(self._api.cuMemGetInfo())[0])

    def allocate(self, nbytes: int) -> int:
        result = self._api.cuMemAlloc(max(nbytes, 1))
        if result[0] == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free = self.free_bytes()
            raise OutOfMemory(
                f"the GPU has {free / 2**20:,.0f} MiB free and {nbytes / 2**20:,.0f} MiB more are needed: close other "
                "programs that use it, lower the context (-c), -np or --cache-bytes, or use --backend cpu"
            )
        return int(self._call(result))

    def release(self, address: int) -> None:
        self._give_back(self._api.cuMemFree, address)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        address = int(self._call(self._api.cuMemHostAlloc(nbytes, 0)))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._give_back, self._api.cuMemFreeHost, address)
        return np.ctypeslib.as_array(memory)

    def _give_back(self, release: Callable[[Any], Any], what: Any) -> None:
        """In any thread. At exit the driver may be gone already, so its answer does not matter."""
        if os.getpid() == self._process:
            self._api.cuCtxSetCurrent(self._context)
            release(what)

    def upload(self, address: int, data: NDArray[Any]) -> None:
        assert data.flags.c_contiguous
        self._call(self._api.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self._stream))
        self.synchronize()

    def download(self, address: int, out: NDArray[Any]) -> None:
        assert out.flags.c_contiguous
        self._call(self._api.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._stream))
        self.synchronize()

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        self._call(self._api.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self._stream))

    def receive(self, address: int, out: NDArray[np.uint8]) -> None:
        self._call(self._api.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._stream))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self._call(self._api.cuMemsetD8Async(address, byte, nbytes, self._stream))

    # -- kernels -------------------------------------------------------------------------------------------------

    def load(self, binaries: dict[Kernel, Binary]) -> None:
        for kernel, binary in binaries.items():
            module = self._call(self._api.cuModuleLoadData(binary.code))
            handle = self._call(self._api.cuModuleGetFunction(module, binary.function.encode()))
            function = self._functions[kernel] = LoadedKernel(handle, kernel, binary)
            most = max(function.shared, self._even(1)) if function.spread else function.shared
            if most > SMALL_SHARED:
                kind = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call(self._api.cuFuncSetAttribute(handle, kind, most))

    def function(self, kernel: Kernel) -> LoadedKernel:
        return self._functions[kernel]

    def launch(self, function: LoadedKernel, grid: Grid, args: Sequence[int | float]) -> None:
        values: list[Any] = [kind(arg) for kind, arg in zip(function.types, (*args, 0, 0), strict=True)]
        pointers = function.pointers(*map(ctypes.addressof, values))
        config = self._launching()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.sharedMemBytes = function.threads, function.shared
        if function.spread:
            config.sharedMemBytes = max(function.shared, self._even(math.prod(grid)))
        config.hStream = getattr(self._thread, "stream", self._stream)
        config.numAttrs = int(function.early and self.target >= EARLIEST)
        self._call(self._api.cuLaunchKernelEx(config, function.handle, ctypes.addressof(pointers), 0))

    def _even(self, programs: int) -> int:
        """Shared memory with which programs cannot crowd on some processors while others have few: those that start
        early find room on few. At least two fit on a processor, so that the next kernel can start early, too."""
        on_each = max(-(-programs // self.processors), 2)
        return (self._shared // on_each - BLOCK_SHARED) // 1024 * 1024

    def _launching(self) -> Any:
        """This thread's configuration of launches, in which a launch sets what is its own."""
        config = getattr(self._thread, "config", None)
        if config is None:
            api = self._api
            early = api.CUlaunchAttribute()
            early.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config = self._thread.config = api.CUlaunchConfig()
            config.blockDimY = config.blockDimZ = 1
            config.attrs = [early]
        return config

    # -- the stream ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._call(self._api.cuStreamSynchronize(self._stream))

    def event(self) -> Event:
        return self._held(self._call(self._api.cuEventCreate(0)), self._api.cuEventDestroy)

    def record(self, event: Event) -> None:
        self._call(self._api.cuEventRecord(event.handle, self._stream))

    def wait(self, event: Event) -> None:
        self._call(self._api.cuEventSynchronize(event.handle))

    def elapsed(self, start: Event, end: Event) -> float:
        self.wait(end)
        return float(self._call(self._api.cuEventElapsedTime(start.handle, end.handle)))

    def capture(self, launches: Callable[[], None]) -> Graph:
        """On a stream of its own, so that another thread can launch meanwhile."""
        api = self._api
        stream = self._call(api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING))
        try:
            # Relaxed: meanwhile Python may collect an object whose memory is given back.
            self._call(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            self._thread.stream = stream
            try:
                launches()
            except BaseException:
                api.cuStreamEndCapture(stream)  # what was captured is not used
                raise
            finally:
                del self._thread.stream
            graph = self._call(api.cuStreamEndCapture(stream))
        finally:
            api.cuStreamDestroy(stream)
        try:
            return self._held(self._call(self._api.cuGraphInstantiate(graph, 0)), self._api.cuGraphExecDestroy)
        finally:
            self._call(self._api.cuGraphDestroy(graph))

    def replay(self, graph: Graph) -> None:
        self._call(self._api.cuGraphLaunch(graph.handle, self._stream))

    def _held(self, handle: Any, release: Callable[[Any], Any]) -> Held:
        held = Held(handle)
        weakref.finalize(held, self._give_back, release, handle)
        return held

    def _call(self, result: Iterable[Any]) -> Any:
        """The value of a call of the bindings, which return (error, value...)."""
        error, *values = result
        if error != self._api.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"the GPU reports {error.name}: start kvarn again; if it comes back, please report it")
        return values[0] if len(values) == 1 else values


class DeviceError(KvarnError):
    """The driver reports an error. After most of them the device's memory is lost."""


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KvarnError(f"--backend cuda needs NVIDIA's bindings ({error}): pip install 'kvarn[cuda]'") from None
    return driver
