"""The CPU backend: native kernels that read the cache in place, and models as native programs.

Memory is HostMemory (backends/host.py) in large pages, with a native view of it. `program.py` runs
models. Both use one pool of threads. Instruction sets are chosen at run time (kvarn.native).
"""

from kvarn import native
from kvarn.backends.cpu.memory import CpuKernels, CpuMemory
from kvarn.backends.cpu.program import CpuProgram, load_program
from kvarn.backends.host import HostMemory
from kvarn.backends.host_memory import memory_bytes
from kvarn.backends.pool import make_pool
from kvarn.cache.plan import Plan
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress

ORDINARY = 4096  # tokens of a step whose workspace fits every machine that can hold the model

LARGEST_HEAD = 256  # kMaxHeadDim in native/view.hpp


class Cpu:
    name = "cpu"
    default_layout = "columns"
    ahead = 0

    def __init__(self, pool: native.Pool | None = None) -> None:
        self.pool = pool or make_pool(None)
        self.kernels = CpuKernels(self.pool)

    @property
    def memory_bytes(self) -> int | None:
        return memory_bytes()

    def room(self) -> None:
        return None

    def memory(self, plan: Plan) -> CpuMemory:
        return CpuMemory(self.layers(plan))

    def layers(self, plan: Plan) -> HostMemory:
        self.check(plan)
        return HostMemory(plan, self.kernels, native.arena)  # in large pages: a tile of keys fills a small one

    def check(self, plan: Plan) -> None:
        """Refuse a cache that the kernels do not have."""
        for codec in (plan.codec.k, plan.codec.v):
            if codec.name not in native.Codec.__members__:
                raise KvarnError(f"the cpu backend has no {codec.name} cells: use --backend reference")
        for group in plan.groups:
            spec = group.config.spec
            if spec.k_dim != spec.v_dim:
                raise KvarnError(
                    f"keys of {spec.k_dim} and values of {spec.v_dim} numbers: the cpu backend wants them equal; "
                    "use --backend reference"
                )
            if spec.k_dim > LARGEST_HEAD:
                raise KvarnError(f"heads of {spec.k_dim} numbers: the cpu backend has kernels up to {LARGEST_HEAD}")

    def load(self, checkpoint: Checkpoint, graph: Graph, max_tokens: int, progress: Progress) -> CpuProgram:
        program = load_program(checkpoint, graph, self.pool, progress)
        if max_tokens > ORDINARY:
            self._check_workspace(program, max_tokens)
        program.reserve(max_tokens)
        return program

    def _check_workspace(self, program: CpuProgram, max_tokens: int) -> None:
        wanted, memory = program.workspace_for(max_tokens, 1, 1), self.memory_bytes
        if memory is not None and wanted > memory:
            raise OutOfMemory(
                f"a step of {max_tokens} tokens would take {wanted / 2**30:.1f} GiB of workspace and this machine has "
                f"{memory / 2**30:.1f} GiB of memory: lower the tokens of a step (-b)"
            )

    def facts(self) -> dict[str, str]:
        return {"name": self.name, "isa": native.isa(), "order": native.sum_order()}


def open_backend(threads: int | None, progress: Progress) -> Cpu:
    return Cpu(make_pool(threads))
