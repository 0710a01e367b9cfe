"""The CUDA backend: Triton kernels compiled ahead of time, launched through NVIDIA's driver. No torch.

    specs      the kernels and their specialisations     kernels/   their code
    store      where binaries are found                  build      how they are compiled, by workers
    driver     NVIDIA's driver                           probe      whether there is a device
    buffers, inbox, memory, layers                       the cache on the device, and a step's integers
    weights, products, emit, graphs, program, timeline   a model on the device
    limits     what is refused                           selftest   whether results are exact

This module, probe, limits and specs are imported on machines without a device: they import nothing large.
"""

from kvarn.backends import check_threads
from kvarn.backends.base import Backend
from kvarn.backends.cuda.probe import usable_device
from kvarn.loading.progress import Progress


def open_backend(threads: int | None, progress: Progress) -> Backend:
    """The first device. The threads of the host have no effect; a wrong number is refused all the same."""
    check_threads(threads)
    usable_device()
    from kvarn.backends.cuda.backend import on_first_device

    return on_first_device(progress)
