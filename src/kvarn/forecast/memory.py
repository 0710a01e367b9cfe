"""Bytes that a model needs on the host: each from the code that allocates it.

    weights      a program whose matrices have sizes and no numbers (backends/cpu/program.py)
    cache        the plan of the cache; and the tables that kernels read
    evicted      the host cache, when it is full
    workspace    the same program, for the largest step and the most sequences
    process      this process before it has a model: Python, kvarn and the libraries
    vocabulary   the tokenizer
    bookkeeping  the cache's tree of known blocks
    pages        what is lost at the ends of large pages

The total is what the process holds when every block of the cache was written: what must fit.
Non-goals: what a server holds of requests and answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvarn.backends.cpu.paging import lost_bytes
from kvarn.backends.cpu.program import CpuProgram
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.plan import Plan
from kvarn.cache.spec import LayerSpec, align

# A tokenizer's fixed part, and its part for each token: docs/journal.md, "Forecasts of memory and speed".
SENTENCE_PIECE = 2 << 20, 234
BYTE_LEVEL = 6 << 20, 430
PER_BLOCK = 1536  # of a block that holds tokens which can be shared: its place in the prefix tree
CHUNK = 256  # keys of one softmax: kChunk in native/view.hpp
TABLE_ENTRY = 8  # a block and its position in a table


@dataclass(frozen=True, slots=True)
class Memory:
    weights: int
    kinds: Mapping[str, int]  # the weights by packed kind
    cache: int
    evicted: int
    workspace: int
    process: int
    vocabulary: int
    bookkeeping: int
    pages: int

    @property
    def beside(self) -> int:
        """What is not of the model's own size."""
        return self.process + self.vocabulary + self.bookkeeping + self.pages

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.evicted + self.workspace + self.beside


def cache_bytes(plan: Plan) -> int:
    """Cells, and tables."""
    return plan.nbytes + sum(TABLE_ENTRY * plan.max_seqs * group.blocks_per_sequence for group in plan.groups)


def most_keys(plan: Plan) -> int:
    """In the chunks that attention computes for one query. A window may begin and end inside of a chunk."""
    return max(_keys(group.config.spec, plan.context) for group in plan.groups)


def tails_of(plan: Plan) -> int:
    """How many of K and V have a tail: a step keeps the int8 rows of its tokens for them."""
    return sum(codec.tail > 0 for codec in (plan.codec.k, plan.codec.v))


def _keys(spec: LayerSpec, context: int) -> int:
    if spec.window is None:
        return context
    return min(spec.window + CHUNK - 1 + align(spec.pinned, CHUNK), context)


def vocabulary_bytes(n_tokens: int, sentence_piece: bool) -> int:
    fixed, each = SENTENCE_PIECE if sentence_piece else BYTE_LEVEL
    return fixed + each * n_tokens


def bookkeeping_bytes(plan: Plan) -> int:
    return PER_BLOCK * plan.n_blocks if PLACEMENTS[plan.strategy.placement].shares else 0


class Beside(NamedTuple):
    """Bytes that do not depend on the plan of the cache."""

    process: int  # what it holds without a model
    vocabulary: int
    evicted: int = 0  # limit of the host cache


def memory_of(program: CpuProgram, plan: Plan, max_tokens: int, beside: Beside) -> Memory:
    kinds: dict[str, int] = {}
    for matrix in program.weights.matrices.values():
        kinds[matrix.kind] = kinds.get(matrix.kind, 0) + matrix.nbytes
    return Memory(
        weights=program.nbytes,
        kinds=kinds,
        cache=cache_bytes(plan),
        workspace=program.workspace_for(max_tokens, plan.max_seqs, most_keys(plan), plan.codec.v.block, tails_of(plan)),
        process=beside.process,
        vocabulary=beside.vocabulary,
        evicted=beside.evicted,
        bookkeeping=bookkeeping_bytes(plan),
        pages=lost_bytes([plan.nbytes, *(matrix.nbytes for matrix in program.weights.matrices.values())]),
    )


def resident_bytes() -> int | None:
    """Physical memory of this process now; None if the system does not say it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    except (OSError, ValueError, StopIteration):
        return None
