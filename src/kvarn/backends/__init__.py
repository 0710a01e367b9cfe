"""Backends by name. One is imported when it is opened, so that a machine needs only what it uses."""

from importlib import import_module

from kvarn.backends.base import Backend
from kvarn.errors import KvarnError

BACKENDS = ("cpu", "reference")


def open_backend(name: str, threads: int | None = None) -> Backend:
    """To add one: a package of its name whose `open_backend(threads)` gives a Backend, and its name in BACKENDS."""
    if name not in BACKENDS:
        raise KvarnError(f"unknown backend {name!r}; there are: {', '.join(BACKENDS)}")
    opened: Backend = import_module(f"kvarn.backends.{name}").open_backend(threads)
    return opened
