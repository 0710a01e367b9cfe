"""A machine with an NVIDIA device, as far as kvarn looks before it computes: a driver library, and a backend.

`install` makes `probe` find the device and `open_backend("cuda")` open the backend, which computes as the null backend.
"""

import ctypes
from dataclasses import dataclass, field

import pytest
from support.null_backend import Null, NullMemory

from kvarn.backends import check_threads, cuda
from kvarn.backends.cuda import probe
from kvarn.cache.plan import Plan
from kvarn.errors import KvarnError
from kvarn.loading.progress import Progress

GIB = 1 << 30


@dataclass
class FakeDriver:
    """libcuda and libnvidia-ml in one object. Statuses that are not 0 are failures."""

    name: bytes = b"NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    version: int = 13000
    count: int = 1
    total: int = 140 * GIB
    free: int = 130 * GIB
    init: int = 0
    nvml: int = 0

    def cuInit(self, flags) -> int:
        return self.init

    def cuDeviceGetCount(self, out) -> int:
        out._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, out) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGet(self, out, ordinal) -> int:
        out._obj.value = ordinal
        return 0 if ordinal < self.count else 101

    def cuDeviceGetName(self, out, size, device) -> int:
        out.value = self.name[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, out, device) -> int:
        out._obj.value = self.total
        return 0

    def cuDeviceGetAttribute(self, out, which, device) -> int:
        out._obj.value = self.capability[which - 75]
        return 0

    def cuDeviceGetPCIBusId(self, out, size, device) -> int:
        out.value = b"0000:01:00.0"
        return 0

    def cuGetErrorName(self, status, out) -> int:
        out._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" if status == 803 else None
        return 0

    def nvmlInit_v2(self) -> int:
        return self.nvml

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, out) -> int:
        return 0 if bus.value == b"0000:01:00.0" else 2

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, out) -> int:
        out._obj.free = self.free
        return 0


@dataclass
class FakeCuda(Null):
    """The null backend with memory of its own. Loading takes some of it."""

    free: int = 130 * GIB
    taken: int = 0  # by the weights
    exact: str = "yes"
    events: list[str] = field(default_factory=list)

    name, default_layout, memory_bytes = "cuda", "head-major", 140 * GIB
    ahead = 0

    def room(self) -> int:
        return self.free

    def memory(self, plan: Plan) -> NullMemory:
        self.events.append(f"memory {plan.nbytes}")
        return NullMemory()

    def load(self, checkpoint, graph, max_tokens, progress):
        self.events.append("load")
        self.free -= self.taken
        return super().load(checkpoint, graph, max_tokens, progress)

    def facts(self) -> dict[str, str]:
        size = f"{self.memory_bytes / GIB:.1f} GiB"
        where = {"device": "NVIDIA H200", "memory": size, "compute": "9.0", "driver": "13.0"}
        return {"name": self.name, **where, "kernels": "50 from the package", "exact": self.exact}


def install(
    monkeypatch: pytest.MonkeyPatch,
    driver: FakeDriver | None = None,
    backend: FakeCuda | KvarnError | None = None,
    bindings: bool = True,
) -> None:
    libraries = driver or FakeDriver()

    def opened(threads: int | None, progress: Progress) -> FakeCuda:
        check_threads(threads)
        if isinstance(backend, KvarnError):
            raise backend
        return backend or FakeCuda()

    monkeypatch.setattr(probe, "_open", lambda name: libraries)
    monkeypatch.setattr(probe, "_has_bindings", lambda: bindings)
    monkeypatch.setattr(cuda, "open_backend", opened)
