"""The CUDA backend: Triton kernels compiled ahead of time, launched through NVIDIA's driver. No torch.

This module, `probe`, `limits` and `specs` are imported on machines without a device, so they import no cuda-bindings.
"""

from kvarn.backends import check_threads
from kvarn.backends.base import Backend
from kvarn.backends.cuda.probe import usable_device
from kvarn.errors import KvarnError


def open_backend(threads: int | None) -> Backend:
    """The threads of the host have no effect; a wrong number is refused all the same."""
    check_threads(threads)
    device = usable_device()
    raise KvarnError(f"{device.name} cannot be used yet: this version has no kernels; use --backend cpu")
