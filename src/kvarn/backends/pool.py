"""The thread pool of the host backends."""

import logging
import os
from collections.abc import Sequence

from kvarn.backends import check_threads
from kvarn.native import Pool

log = logging.getLogger("kvarn")


def default_threads() -> int:
    """Physical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(physical_cores(os.sched_getaffinity(0))))
    return os.cpu_count() or 1


def processors() -> int:
    """Those that this process may use; a core may have two."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(cpus: Sequence[int] | set[int]) -> set[str]:
    cores = set()
    for cpu in cpus:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path) as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return cores


def make_pool(threads: int | None) -> Pool:
    check_threads(threads)
    most = processors()
    if threads is not None and threads > most:  # threads that share a processor wait for each other
        log.warning("%d threads: this process may use %d processors, so it has %d threads", threads, most, most)
    return Pool(default_threads() if threads is None else min(threads, most))
