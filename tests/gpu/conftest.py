"""Tests of the CUDA backend without a GPU: kernels are compiled for every target, and run in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set before anything imports Triton. Kernels
are compiled in processes of their own, without it.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def driver() -> Iterator[Any]:
    """A device whose kernels run in the interpreter. At the end, nothing around its allocations was written."""
    from gpu.support.interpreter import InterpretingDriver

    device = InterpretingDriver(total_bytes=1 << 30)
    yield device
    device.check()


@pytest.fixture
def cuda(driver: Any) -> Any:
    from kvarn.backends.cuda.backend import Cuda

    return Cuda(driver, "interpreted", True)
