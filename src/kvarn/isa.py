"""Which instruction set the native kernels use.

The best one that runs here, unless KVARN_ISA names another (so that every path can be tested on one machine).
All of them give the same bits; only speed differs.
"""

import os

try:
    from kvarn import _native
except ImportError as error:
    raise ImportError(
        f"kvarn's native extension is not built for this Python ({error}): "
        "run `make test` in a checkout, or `pip install .`"
    ) from error

from kvarn._native import CacheView, Pool, Program, Weight
from kvarn.errors import KvarnError

__all__ = ["CacheView", "Pool", "Program", "Weight", "available", "cpu_features", "current", "native", "select"]

native = _native


def current() -> str:
    return native.isa()


def available() -> list[str]:
    """Best first."""
    return native.isas()


def cpu_features() -> list[str]:
    return native.cpu_features()


def select(name: str) -> None:
    if not native.select(name):
        raise KvarnError(f"instruction set {name!r} does not run here; available: {', '.join(available())}")


def select_from_environment() -> None:
    if name := os.environ.get("KVARN_ISA"):
        try:
            select(name)
        except KvarnError as error:
            raise KvarnError(f"KVARN_ISA: {error}") from None


select_from_environment()
