"""Kernels without bookkeeping: the steps of a cache are recorded once and replayed on any layout, codec and backend.

A step is integers. It names blocks, first positions, lengths and cells; it does not know what a cell looks like or who
computes. So one recording of a strategy at a block size serves every layout, codec and instruction set. A recording's
block ids are shuffled: no kernel may rely on blocks that lie side by side.

Not here: whether the steps are right. test_conformance.py proves that through the book and the memory together.
"""

import random
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from support.harness import Inputs, Schedule, cells_of_nan, inputs

from kvarn.backends.cpu import Cpu
from kvarn.backends.host import HostMemory
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy, GroupStep, RowEdit, Step


@dataclass(frozen=True)
class Recording:
    config: CacheConfig
    steps: tuple[Step, ...]
    spans: tuple[tuple[tuple[int, int, int], ...], ...]  # per step: (sequence, first position, end) in row order
    rows: tuple[Inputs, ...]  # per step: q, k, v of its new tokens


@cache
def data_of(spec: LayerSpec, length: int, seq: int) -> Inputs:
    """A shorter schedule reads the beginning of it, so that one expected result serves every schedule."""
    return inputs(spec, length, seed=10 * seq)


def record(config: CacheConfig, schedule: Schedule) -> Recording:
    """What the bookkeeping of this configuration says to its memory over the schedule. The memory has one layer."""
    planned = plan(replace(config, layout=None, codec="f32"), "head-major")
    (spec,), book = config.layers, KVCache(planned)
    (group,) = planned.groups
    shuffled = list(range(group.config.n_blocks))
    random.Random(1).shuffle(shuffled)
    done: dict[int, int] = {}
    steps, spans, rows = [], [], []
    for batch in schedule:
        for seq, n in batch.items():
            if seq not in done:
                book.open(seq, salt=str(seq).encode())
                done[seq] = 0
            assert book.reserve(seq, done[seq] + n)
        step = book.prepare(list(batch))
        part = tuple((seq, done[seq], done[seq] + batch[seq]) for seq in step.seqs)
        for seq, start, end in part:
            book.advance(seq, end - start)
            book.commit(seq, range(start, end))
            done[seq] = end
        steps.append(step._replace(groups=tuple(renumbered(g, shuffled, group.config.block_size) for g in step.groups)))
        spans.append(part)
        pieces = [(data_of(spec, config.context, seq), start, end) for seq, start, end in part]
        rows.append(Inputs(*(np.concatenate([getattr(x, name)[a:b] for x, a, b in pieces]) for name in "qkv")))
    return Recording(config, tuple(steps), tuple(spans), tuple(rows))


def renumbered(step: GroupStep, ids: list[int], block_size: int) -> GroupStep:
    """The same step with other ids of blocks."""
    return step._replace(
        moves=[Copy(ids[move.src], ids[move.dst], move.slots) for move in step.moves],
        edits=[RowEdit(e.row, e.start, [ids[block] for block in e.blocks], e.firsts) for e in step.edits],
        cells=[ids[cell // block_size] * block_size + cell % block_size for cell in step.cells],
    )


def memory_of(recording: Recording, place: Reference | Cpu, layout: str | None, codec: str) -> HostMemory:
    """Every cell is NaN before it is written."""
    memory = place.layers(plan(replace(recording.config, layout=layout, codec=codec), place.default_layout))
    cells_of_nan(memory.stores)
    return memory


def replay_on(memory: HostMemory, recording: Recording) -> dict[int, np.ndarray]:
    """Output by sequence, [T, n_heads, dim]."""
    output: dict[int, list[np.ndarray]] = {}
    for step, spans, x in zip(recording.steps, recording.spans, recording.rows, strict=True):
        before = memory.counters.read
        memory.apply(step)
        memory.write(0, x.k, x.v)
        result = memory.attend(0, x.q)
        assert memory.counters.read - before == memory.plan.read_bytes(step), "what the step says, and no more"
        at = 0
        for seq, start, end in spans:
            output.setdefault(seq, []).append(result[at : at + end - start])
            at += end - start
    return {seq: np.concatenate(parts) for seq, parts in output.items()}


def replay(recording: Recording, place: Reference | Cpu, layout: str | None, codec: str) -> dict[int, np.ndarray]:
    return replay_on(memory_of(recording, place, layout, codec), recording)
