"""Backends by name. A backend is imported when it is opened, so unused backends need not be installed."""

from importlib import import_module

from kvarn.backends.base import Backend
from kvarn.errors import KvarnError

BACKENDS = ("cpu", "reference")


def open_backend(name: str, threads: int | None = None) -> Backend:
    """To add a backend, write a package with its name that has `open_backend(threads)`, and add it to BACKENDS."""
    if name not in BACKENDS:
        raise KvarnError(f"unknown backend {name!r}; there are: {', '.join(BACKENDS)}")
    backend: Backend = import_module(f"kvarn.backends.{name}").open_backend(threads)
    return backend
