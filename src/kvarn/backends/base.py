"""What a device gives: memory for a cache, and programs that run a model's steps over it.

    plan -> Backend.memory -> Memory          checkpoint -> Backend.load -> Program
    KVCache.prepare -> Step                   Program.run(memory, step, tokens, wanted) -> Logits

Bookkeeping never sees a device and a device never sees bookkeeping: a Step, which is integers, is all that crosses.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvarn.arrays import Floats
from kvarn.cache.plan import Plan
from kvarn.cache.step import Step
from kvarn.graph.record import Graph
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress
from kvarn.models.config import ModelConfig


@dataclass(slots=True)
class Counters:
    """Bytes moved, kernels called and their time, counted where the bytes move and nowhere else."""

    written: int = 0  # into cells, by attention's write
    read: int = 0  # out of cells, by the attention kernels
    copied: int = 0  # from cells to cells: copy-on-write, and a fork of what cannot be shared
    calls: Counter[str] = field(default_factory=Counter)  # by kernel
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kernel


class Memory(Protocol):
    """The bytes and tables of one cache on a device."""

    @property
    def counters(self) -> Counters: ...

    def read_block(self, group: int, block: int) -> bytes:
        """A block of every layer of the group in the canonical form, whatever the layout: by layer K, V, K scales,
        V scales, each [slot, KV head, unit]. Repeated heads stand once."""

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """The other way round."""


class Layers(Protocol):
    """A cache driven layer by layer, with arrays of the host: what conformance tests and `kvarn strategies` do. A
    program does the same without leaving its device."""

    @property
    def counters(self) -> Counters: ...

    def apply(self, step: Step) -> None:
        """Its moves, then the edits of its tables."""

    def write(self, layer: int, k: Floats, v: Floats) -> None:
        """This step's keys and values, [T, n_kv_heads, dim], into the layer's cells."""

    def attend(self, layer: int, q: Floats, scale: float | None = None) -> Floats:
        """Attention of this step's queries, [T, n_heads, k_dim], over the layer's cells: [T, n_heads, v_dim]."""


class Logits(Protocol):
    """What a step computed, kept where it was computed until it is asked for. Valid until the program's next run."""

    def rows(self) -> Floats:
        """[wanted, vocabulary], on the host."""


class Span(NamedTuple):
    """Something that took time, in ns of the monotonic clock."""

    name: str  # `step` is a whole one
    begin: int
    end: int
    facts: dict[str, int] = {}  # noqa: RUF012 (nobody writes to it)


class Program(Protocol):
    """A model ready to run, over memories of its own backend."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Of the weights; a tied embedding is counted once."""

    @property
    def workspace(self) -> int:
        """Bytes that it holds between steps besides the weights."""

    def run(self, memory: Any, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        """Apply the step to the memory, then compute its tokens: one id for each position. `wanted` are the rows, in
        ascending order, whose logits will be asked for; one sequence may have several. A backend that keeps sampled
        ids on its device also takes -1 - r for "what row r of the last step sampled"; others refuse it."""

    def hidden(self, memory: Any, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
        """The same, but for the wanted rows' final hidden states, [wanted, hidden]: what embeddings are made of."""

    def trace(self, on: bool) -> None:
        """Record what each operation takes, from now on."""

    def timings(self) -> list[Span]:
        """Steps, then operations, since tracing began or this was last asked."""


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def default_layout(self) -> str: ...

    @property
    def memory_bytes(self) -> int | None:
        """What the device has in all; None where nobody says."""

    def memory(self, plan: Plan) -> Memory:
        """Room for what the plan describes. Raises OutOfMemory."""

    def layers(self, plan: Plan) -> Layers: ...

    def load(self, checkpoint: Checkpoint, graph: Graph, max_tokens: int, progress: Progress) -> Program:
        """The model that the graph describes, with workspaces for steps of max_tokens tokens (a larger one may grow
        them)."""

    def facts(self) -> dict[str, str]:
        """What users may want to know about it: the device, the instruction set."""
