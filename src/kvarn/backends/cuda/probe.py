"""What the NVIDIA driver says about this machine, without a context and without cuda-bindings.

`probe` never raises and keeps no state, so it may be called in every process: on machines without a device, and in
children of a process that has used one. It looks at the first device, which is the one that the backend opens
(CUDA_VISIBLE_DEVICES selects another). Non-goals: kernels (store.py); whether results are exact (selftest.py).
"""

import ctypes
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvarn.errors import KvarnError

OLDEST_DRIVER = (12, 0)  # binaries of every CUDA 12 run there
OLDEST_TARGET = 80  # compute capability 8.0: the first with bf16
NO_DEVICE = "no NVIDIA device"

_MISSING = 100  # CUDA_ERROR_NO_DEVICE
_NOT_HERE = 3  # CUDA_ERROR_NOT_INITIALIZED
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    target: int  # compute capability: 90
    driver: str  # newest version of CUDA that the driver supports: "13.0"
    total_bytes: int
    free_bytes: int  # the total, if the driver does not say it


@dataclass(frozen=True, slots=True)
class Probe:
    """A device may be there and not usable. Without a device there is always an obstacle."""

    device: Device | None = None
    obstacle: str = ""  # why the cuda backend cannot run here; empty if nothing stands in its way

    @property
    def absent(self) -> bool:
        return self.obstacle == NO_DEVICE


class _Failed(Exception):
    """A call of the driver did not succeed."""


def usable_device() -> Device:
    """The device, or an error that says why there is none."""
    found = probe()
    if found.device is None or found.obstacle:
        raise KvarnError(f"the cuda backend cannot run here: {found.obstacle}; --backend cpu works everywhere")
    return found.device


def probe() -> Probe:
    try:
        driver = _open("libcuda.so.1")
    except OSError:
        if Path("/dev/nvidia0").exists():
            return Probe(obstacle="there is an NVIDIA device, but not the library of its driver, libcuda.so.1")
        return Probe(obstacle=NO_DEVICE)
    try:
        device = _first_device(driver)
    except (_Failed, AttributeError) as failure:  # AttributeError: a function that the library lacks
        return Probe(obstacle=f"the NVIDIA driver does not work ({failure})")
    return Probe(obstacle=NO_DEVICE) if device is None else Probe(device, _obstacle(device))


def _obstacle(device: Device) -> str:
    if tuple(map(int, device.driver.split("."))) < OLDEST_DRIVER:
        oldest = ".".join(map(str, OLDEST_DRIVER))
        return f"the driver of {device.name} has CUDA {device.driver} and {oldest} is needed: install a newer driver"
    if device.target < OLDEST_TARGET:
        shown, needed = (f"{target // 10}.{target % 10}" for target in (device.target, OLDEST_TARGET))
        return f"{device.name} has compute capability {shown} and kernels need {needed} or more"
    return "" if _has_bindings() else "cuda-bindings is not installed: pip install 'kvarn[cuda]'"


def _has_bindings() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except (ImportError, ValueError):  # there is no package `cuda`, or it is something else
        return False


def _open(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        raise OSError(f"{name} is a library of Linux")
    return ctypes.CDLL(name)


def _first_device(driver: Any) -> Device | None:
    """None: there is a driver, but no device."""
    if (status := driver.cuInit(0)) == _MISSING:
        return None
    if status == _NOT_HERE:
        raise _Failed("this process was forked from one that uses the device: start a new process")
    _check(driver, "cuInit", status)
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    if not count.value:
        return None
    _check(driver, "cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), 0))
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, len(name), device))
    _check(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    major, minor = (_attribute(driver, which, device) for which in (_MAJOR, _MINOR))
    free = _free_bytes(driver, device)
    return Device(
        name=name.value.decode(errors="replace"),
        target=10 * major + minor,
        driver=version_text(version.value),
        total_bytes=total.value,
        free_bytes=total.value if free is None else min(free, total.value),  # a part of a device may be all we see
    )


def version_text(number: int) -> str:
    """12040 -> 12.4"""
    return f"{number // 1000}.{number % 1000 // 10}"


def _attribute(driver: Any, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), which, device))
    return value.value


def _check(driver: Any, call: str, status: int) -> None:
    if status:
        word = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(word))
        raise _Failed(f"{call}: {word.value.decode() if word.value else f'error {status}'}")


class _Usage(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _free_bytes(driver: Any, device: ctypes.c_int) -> int | None:
    """From the management library, as the driver says it only to a process with a context. None: it is not known."""
    try:
        library = _open("libnvidia-ml.so.1")
        bus, handle, usage = ctypes.create_string_buffer(32), ctypes.c_void_p(), _Usage()
        if driver.cuDeviceGetPCIBusId(bus, len(bus), device) or library.nvmlInit_v2():
            return None
        try:
            if library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
                return None
            return None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(usage)) else int(usage.free)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
