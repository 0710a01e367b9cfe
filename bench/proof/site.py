"""The device of a proof and the size of its cases.

Without a GPU (`--interpret`) kernels run in Triton's interpreter, which takes about a millisecond per
program: cases are tiny, and every section runs, so the proof itself can be tested.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from kvarn.backends.cuda.backend import Cuda, on_first_device
from kvarn.backends.cuda.driver import Device
from kvarn.loading.progress import quiet

T = TypeVar("T")
SIZES = ("full", "quick", "tiny", "smallest")


@dataclass
class Site:
    backend: Cuda
    size: str  # one of SIZES
    opened: float  # seconds that opening took, with finding the kernels and the self-test
    model: Path | None = None
    text: Path | None = None
    folder: TemporaryDirectory[str] = field(default_factory=lambda: TemporaryDirectory(prefix="kvarn-proof-"))

    @property
    def driver(self) -> Device:
        return self.backend._driver

    @property
    def interpreted(self) -> bool:
        return self.size in SIZES[2:]

    def pick(self, full: T, quick: T, tiny: T, smallest: T | None = None) -> T:
        """The choice for this size. Without one of its own, the smallest size is tiny."""
        choices = dict(zip(SIZES, (full, quick, tiny, tiny if smallest is None else smallest), strict=True))
        return choices[self.size]

    def random(self, *seed: int) -> np.random.Generator:
        return np.random.default_rng([7, *seed])


def open_site(interpret: bool, quick: bool, model: Path | None, text: Path | None) -> Site:
    began = time.monotonic()
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        from gpu.support.interpreter import InterpretingDriver

        backend, size = Cuda(InterpretingDriver(total_bytes=3 << 30), "interpreted", True), SIZES[2 + quick]
    else:
        backend, size = on_first_device(quiet), SIZES[quick]
    return Site(backend, size, time.monotonic() - began, model, text)
