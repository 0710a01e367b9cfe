"""The machine of a benchmark: its description, and its measured memory bandwidth."""

import os
import platform
from pathlib import Path

from kvarn import __version__, native
from kvarn.backends.pool import default_threads

SMALLEST = 1 << 20  # bytes; with fewer, the loop around the reads would dominate the time


class Bandwidth:
    """GB/s of reading the same bytes repeatedly, as decode steps do. Measured once per size.

    The size matters, because data in a CPU cache is read several times faster."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.on_host = True  # False: the bytes are on a device, whose bandwidth is not measured
        self.measured: dict[int, float] = {}  # by bytes

    def at(self, nbytes: int) -> float:
        size = _rounded(max(nbytes, SMALLEST))
        if size not in self.measured:
            self.measured[size] = native.read_bandwidth(size, self.threads)
        return self.measured[size]

    def share(self, gb_s: float, nbytes: int) -> float | None:
        """A rate as a share of this bandwidth."""
        return gb_s / self.at(nbytes) if self.on_host else None


def _rounded(nbytes: int) -> int:
    """Rounded up to two significant bits, so that cases of similar size share a measurement."""
    step = 1 << (nbytes.bit_length() - 2)
    return -(-nbytes // step) * step


def facts(bandwidth: Bandwidth) -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": default_threads(),
        "isa": native.isa(),
        "order": native.sum_order(),
        "threads": bandwidth.threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvarn": __version__,
        "read_gb_s": {str(size): round(rate, 2) for size, rate in sorted(bandwidth.measured.items())},
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
