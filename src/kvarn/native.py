"""The native extension (C++ under native/). No other module imports it. This one selects its instruction set.

Kernels use the best instruction set of this machine, unless KVARN_ISA names another. All instruction sets
give the same bits; they differ only in speed. Products of bf16 can be summed in two orders: `tiles` is
faster with AMX, `pairs` without AMX. By default a machine uses its faster order. KVARN_SUM_ORDER selects
the other order, to get the same bits as the other kind of machine.
"""

import atexit
import os

try:
    from kvarn import _native
except ImportError as error:
    raise ImportError(
        f"kvarn's native extension is not built for this Python ({error}): "
        "run `make test` in a checkout, or `pip install .`"
    ) from error

from kvarn._native import (
    ALONE,
    GROUP_ROWS,
    LARGE_PAGE,
    SHARED_PAGES,
    CacheView,
    Codec,
    Fastest,
    FreshRows,
    Gate,
    Markers,
    PackedMatrix,
    Pool,
    Program,
    Spm,
    arena,
    attend,
    cpu_features,
    dots,
    encode_bf16,
    encode_f16,
    encode_int4,
    encode_int6,
    encode_int8,
    exp,
    isa,
    isas,
    largest_scales,
    log,
    outline,
    pack,
    pack_file,
    pack_planes,
    read_bandwidth,
    sin_cos,
    thread_counts,
    weigh,
    zeros,
)
from kvarn.errors import KvarnError

__all__ = [
    "ALONE",
    "GROUP_ROWS",
    "LARGE_PAGE",
    "SHARED_PAGES",
    "SUM_ORDERS",
    "CacheView",
    "Codec",
    "Fastest",
    "FreshRows",
    "Gate",
    "Markers",
    "PackedMatrix",
    "Pool",
    "Program",
    "Spm",
    "arena",
    "attend",
    "cpu_features",
    "dots",
    "encode_bf16",
    "encode_f16",
    "encode_int4",
    "encode_int6",
    "encode_int8",
    "exp",
    "isa",
    "isas",
    "largest_scales",
    "log",
    "outline",
    "pack",
    "pack_file",
    "pack_planes",
    "read_bandwidth",
    "select_isa",
    "select_sum_order",
    "sin_cos",
    "sum_order",
    "thread_counts",
    "weigh",
    "zeros",
]

SUM_ORDERS = ("pairs", "tiles")


def select_isa(name: str) -> None:
    if not _native.select_isa(name):
        raise KvarnError(f"instruction set {name!r} does not run here; available: {', '.join(isas())}")


def sum_order() -> str:
    return _native.sum_order()


def select_sum_order(name: str) -> None:
    if name not in SUM_ORDERS:
        raise KvarnError(f"there is no order of sums {name!r}; choose {' or '.join(SUM_ORDERS)}")
    _native.select_sum_order(name == "tiles")


def _select_from_environment() -> None:
    for variable, select in (("KVARN_ISA", select_isa), ("KVARN_SUM_ORDER", select_sum_order)):
        if name := os.environ.get(variable):
            try:
                select(name)
            except KvarnError as error:
                raise KvarnError(f"{variable}: {error}") from None


_select_from_environment()
atexit.register(_native.finish_unlocked)
