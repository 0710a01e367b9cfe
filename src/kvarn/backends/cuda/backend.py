"""A device as a backend."""

from threading import Lock

from kvarn.backends.cuda.driver import Device, Driver
from kvarn.backends.cuda.layers import CudaLayers
from kvarn.backends.cuda.limits import MARGIN, require
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.backends.cuda.program import CudaProgram
from kvarn.backends.cuda.selftest import is_exact
from kvarn.backends.cuda.specs import catalogue
from kvarn.backends.cuda.store import Store, revision
from kvarn.cache.plan import Plan
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress

_opening = Lock()


class Cuda:
    name = "cuda"
    default_layout = "head-major"
    ahead = 1

    def __init__(self, driver: Device, kernels: str, exact: bool) -> None:
        """A device whose driver has all kernels. `kernels` says where they came from."""
        self._driver = driver
        self._kernels = kernels
        self._exact = exact

    def check_process(self) -> None:
        """Refuse a child of the process that opened the device."""
        self._driver.bind()

    @property
    def memory_bytes(self) -> int | None:
        return self._driver.total_bytes

    def room(self) -> int | None:
        self._driver.bind()
        return max(self._driver.free_bytes() - MARGIN, 0)

    def memory(self, plan: Plan) -> CudaMemory:
        require(plan)
        return CudaMemory(self._driver, plan)

    def layers(self, plan: Plan) -> CudaLayers:
        return CudaLayers(self.memory(plan))

    def load(self, checkpoint: Checkpoint, graph: Graph, max_tokens: int, progress: Progress) -> CudaProgram:
        self._driver.bind()
        program = CudaProgram(self._driver, checkpoint, graph, progress)
        program.reserve(max_tokens)
        return program

    def facts(self) -> dict[str, str]:
        driver = self._driver
        return {
            "name": self.name,
            "device": driver.name,
            "memory": f"{driver.total_bytes / 2**30:.1f} GiB",
            "compute": f"{driver.target // 10}.{driver.target % 10}",
            "driver": driver.version,
            "kernels": self._kernels,
            "revision": revision(),
            "exact": "yes" if self._exact else "no",
        }


_opened: list[Cuda] = []  # at most one: a device is opened once in a process


def on_first_device(progress: Progress) -> Cuda:
    with _opening:
        if not _opened:
            driver, store = Driver(), Store()
            driver.load(store.find(catalogue(), driver.target, progress))
            _opened.append(Cuda(driver, store.summary, is_exact(driver)))
        _opened[0].check_process()
        return _opened[0]
