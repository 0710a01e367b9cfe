"""The interface of a backend: memory for a cache on a device, and programs that run a model over it.

    plan -> Backend.memory -> Memory          checkpoint -> Backend.load -> Program
    KVCache.prepare -> Step                   Program.run(memory, step, tokens, wanted) -> Logits
    Draw -> Logits.sample -> tokens           or Logits.rows, and the host samples

The bookkeeping knows no device, and a device knows no bookkeeping. Only a Step, which holds integers,
goes from one to the other.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Floats
from kvarn.cache.plan import Plan
from kvarn.cache.step import Step
from kvarn.errors import BadArray
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress
from kvarn.models.config import ModelConfig


@dataclass(slots=True)
class Counters:
    """Bytes moved, kernels called and their time. The code that moves the bytes counts them."""

    written: int = 0  # into cells, by the write kernel
    read: int = 0  # from cells, by the attention kernels
    copied: int = 0  # from cells to cells: copy-on-write, and forks that cannot share blocks
    calls: Counter[str] = field(default_factory=Counter)  # by kernel
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kernel


class Memory(Protocol):
    """The bytes and tables of one cache on a device."""

    @property
    def counters(self) -> Counters: ...

    def apply(self, step: Step) -> Any:
        """Run the step's moves, then its edits of the tables. A program does this for the steps that it runs."""

    def read_block(self, group: int, block: int) -> bytes:
        """One block of every layer of the group, in a form that does not depend on the layout: for each layer K, V,
        K scales, V scales, each [slot, KV head, unit]. Repeated heads are included once."""

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Store what `read_block` returned."""


def check_rows(name: str, x: Any, wanted: tuple[int, int, int]) -> None:
    """Refuse an array that is not what `Layers` takes."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != wanted or not x.flags.c_contiguous:
        got = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        order = ", not contiguous" if isinstance(x, np.ndarray) and not x.flags.c_contiguous else ""
        raise BadArray(f"{name} is {got}{order}; this step takes contiguous float32 {wanted}")


class Layers(Protocol):
    """A cache that is driven layer by layer with host arrays. Conformance tests and `kvarn strategies` use it. A
    program does the same work without leaving its device."""

    @property
    def counters(self) -> Counters: ...

    def apply(self, step: Step) -> None:
        """Run the step's moves, then its edits of the tables."""

    def write(self, layer: int, k: Floats, v: Floats) -> None:
        """Write this step's keys and values, [T, n_kv_heads, dim], into the layer's cells."""

    def attend(self, layer: int, q: Floats, scale: float | None = None) -> Floats:
        """Attention of this step's queries, [T, n_heads, k_dim], over the layer's cells: [T, n_heads, v_dim]."""


class Edits(NamedTuple):
    """Changes of single logits before a token is drawn."""

    ids: NDArray[np.int64]  # ascending
    counts: NDArray[np.int64]  # how often the answer has the token; -1: neither prompt nor answer have it
    biases: NDArray[np.float64]


class Draw(NamedTuple):
    """How to draw one token from a row of logits: everything that the row does not hold. engine/sampling.py says what
    the numbers mean, and a device computes the same function, bit by bit."""

    row: int  # of the wanted rows
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0  # the random number in [0, 1)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    edits: Edits | None = None  # equal in all draws of one row


class Logits(Protocol):
    """Logits of a step, on the device until `rows` is called. Valid until the program's next run."""

    @property
    def samples(self) -> bool:
        """Whether the device can sample them."""

    def sample(self, draws: Sequence[Draw], n_tokens: int) -> Callable[[], list[int]]:
        """Launch the draws, and return a function that waits for their tokens. The next step may be launched before
        it is called. A token is one of the ids below n_tokens. Where the largest logit of a row is not finite it is -1
        for NaN, -2 for infinity and -3 for -infinity. Rows that are sampled with edits change."""

    @property
    def latest(self) -> bool:
        """Whether the next step can name the sampled tokens: no other step was launched since."""

    def rows(self, wanted: Sequence[int] | None = None) -> Floats:
        """[rows, vocabulary], on the host: some rows in ascending order, or all."""


class Span(NamedTuple):
    """A timed operation. Times are in ns of the monotonic clock."""

    name: str  # `step`: the whole step
    begin: int
    end: int
    facts: dict[str, int] = {}  # noqa: RUF012 (it is never changed)


class Program(Protocol):
    """A loaded model. It runs over memories of its own backend."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights. A tied embedding counts once."""

    @property
    def workspace(self) -> int:
        """Bytes that it keeps between steps, without the weights."""

    def run(self, memory: Any, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        """Apply the step to the memory, then compute its tokens.

        `tokens` has one id per position of the step. `wanted` are the rows whose logits are needed, in ascending
        order; one sequence may have several. A backend that keeps sampled ids on its device also takes the id
        -1 - r, which means the token of draw r of the last step. Other backends refuse it."""

    def hidden(self, memory: Any, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
        """Like `run`, but return the final hidden states of the wanted rows, [wanted, hidden], for embeddings."""

    def trace(self, on: bool) -> None:
        """Start or stop recording the time of each operation."""

    def timings(self) -> list[Span]:
        """The spans recorded since the last call: steps first, then operations."""


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def default_layout(self) -> str: ...

    @property
    def memory_bytes(self) -> int | None:
        """Total memory of the device; None if unknown."""

    @property
    def ahead(self) -> int:
        """Steps that can be launched before the host has read the tokens of the last one: 0 or 1."""

    def room(self) -> int | None:
        """Bytes that a cache may take by default, beside what is loaded so far. None: what its sequences need."""

    def memory(self, plan: Plan) -> Memory:
        """Allocate the memory that the plan describes. Raises OutOfMemory."""

    def layers(self, plan: Plan) -> Layers: ...

    def load(self, checkpoint: Checkpoint, graph: Graph, max_tokens: int, progress: Progress) -> Program:
        """Load the model that the graph describes. The workspace fits steps of max_tokens tokens; a larger step may
        enlarge it."""

    def facts(self) -> dict[str, str]:
        """Facts to show to users, such as the device and the instruction set."""
