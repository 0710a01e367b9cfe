"""Backends by name. A backend is imported when it is opened, so unused backends need not be installed."""

from importlib import import_module

from kvarn.backends.base import Backend
from kvarn.cache.plan import Plan
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.loading.progress import Progress, quiet

BACKENDS = ("cpu", "cuda", "reference")
AUTO = "auto"  # not a backend: the first that can run the model (choice.py)
MOST_THREADS = 1024


def open_backend(name: str, threads: int | None = None, progress: Progress = quiet) -> Backend:
    """To add a backend, write a package with its name that has `open_backend(threads, progress)`, and add its
    name to BACKENDS."""
    if name not in BACKENDS:
        raise KvarnError(f"unknown backend {name!r}; there are: {', '.join(BACKENDS)}")
    backend: Backend = import_module(f"kvarn.backends.{name}").open_backend(threads, progress)
    return backend


def check_threads(threads: int | None) -> None:
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool)):
        raise KvarnError(f"{threads!r} threads; it must be a whole number")
    if threads is not None and threads < 1:
        raise KvarnError(f"{threads} threads; it must be at least 1")
    if threads is not None and threads > MOST_THREADS:
        raise KvarnError(f"{threads} threads; {MOST_THREADS} is the most")


def place_of(backend: Backend) -> str:
    """Where its memory is, for sentences: "this machine", "NVIDIA H200"."""
    return backend.facts().get("device", "this machine")


def check_memory(plan: Plan, backend: Backend) -> None:
    """Refuse a cache that the device cannot hold. An allocation would succeed: pages are backed at the first write."""
    tables = sum(8 * plan.max_seqs * group.blocks_per_sequence for group in plan.groups)
    wanted, memory = plan.nbytes + tables, backend.memory_bytes
    if memory is not None and wanted > memory:
        raise OutOfMemory(
            f"keys and values would take {wanted / 2**30:.1f} GiB and {place_of(backend)} has "
            f"{memory / 2**30:.1f} GiB of memory: lower the context (-c), the sequences at once (-np) or --cache-bytes"
        )
