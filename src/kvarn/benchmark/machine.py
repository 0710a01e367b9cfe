"""The machine under a benchmark: what it is, and how fast it reads memory, measured and not looked up."""

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvarn import __version__, isa

SMALLEST = 1 << 20  # bytes: below this the loop around the reads would be measured
PASSES = 7


class Bandwidth:
    """GB/s of reading as many bytes again and again, as a decode step does; measured once per size.

    The size matters: what fits a cache is read several times faster than what does not."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.measured: dict[int, float] = {}  # by bytes

    def at(self, nbytes: int) -> float:
        size = _rounded(max(nbytes, SMALLEST))
        if size not in self.measured:
            self.measured[size] = read_bandwidth(size, self.threads)
        return self.measured[size]


def read_bandwidth(nbytes: int, threads: int) -> float:
    """The best of several passes, in GB/s."""
    native = getattr(isa.native, "read_bandwidth", None)
    return float(native(nbytes, threads)) if native is not None else _numpy_bandwidth(nbytes, threads)


def _numpy_bandwidth(nbytes: int, threads: int) -> float:
    parts = np.array_split(np.ones(nbytes // 8, np.int64), threads)
    best = float("inf")

    def read(part: NDArray[np.int64]) -> int:
        return int(part.max())  # vectorized, and without the interpreter's lock

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(read, parts))
            best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9


def _rounded(nbytes: int) -> int:
    """Up to two significant bits, so that cases of about one size share a measurement."""
    step = 1 << (nbytes.bit_length() - 2)
    return -(-nbytes // step) * step


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(bandwidth: Bandwidth) -> dict[str, object]:
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "isa": isa.current(),
        "threads": bandwidth.threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvarn": __version__,
        "read_gb_s": {str(size): round(rate, 2) for size, rate in sorted(bandwidth.measured.items())},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
