"""Which instruction set the native kernels use, and in which order they sum products of bf16.

The best instruction set that runs here, unless KVARN_ISA names another (so that every path can be tested on one
machine). All of them give the same bits; only speed differs. The order is the one that this machine is fast at: `tiles`
with AMX, `pairs` otherwise. KVARN_ORDER asks for the other, to have the bits of another kind of machine.
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

__all__ = [
    "ORDERS",
    "CacheView",
    "Pool",
    "Program",
    "Weight",
    "available",
    "cpu_features",
    "current",
    "native",
    "order",
    "select",
    "select_order",
]

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


ORDERS = ("pairs", "tiles")


def order() -> str:
    return native.order()


def select_order(name: str) -> None:
    if name not in ORDERS:
        raise KvarnError(f"there is no order of sums {name!r}; choose {' or '.join(ORDERS)}")
    native.select_order(name == "tiles")


def select_from_environment() -> None:
    if name := os.environ.get("KVARN_ISA"):
        try:
            select(name)
        except KvarnError as error:
            raise KvarnError(f"KVARN_ISA: {error}") from None
    if name := os.environ.get("KVARN_ORDER"):
        try:
            select_order(name)
        except KvarnError as error:
            raise KvarnError(f"KVARN_ORDER: {error}") from None


select_from_environment()
