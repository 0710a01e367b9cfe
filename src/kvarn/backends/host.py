"""The memory of a cache on the host: one arena, NumPy views of it, and tables. The reference and the cpu
backend share it.

Store   one per layer: strided views of the arena, which are never copied or reshaped.
Table   one per group of layers: the blocks of each sequence, and the cells that this step writes. Rows
        persist between steps. A step rewrites only the changed entries, so its cost does not depend on
        the context length.

A kernel takes a Store, a Table, a LayerSpec and a scale. These arguments are fixed: a feature that needs
more gets its own kernel, chosen by name. It does not add a flag. Kernels never write to tables.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvarn.arrays import Cells, Floats
from kvarn.backends.base import Counters, Draw, check_rows
from kvarn.cache.codec import Codec, CodecPair
from kvarn.cache.plan import LayerOffsets, Part, Parts, Plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy, GroupStep, Step
from kvarn.errors import BadArray, BadStep, OutOfMemory, UnknownLayer


class Rows(NamedTuple):
    """int8 rows of one sequence, from the first position of a tile on."""

    cells: Cells  # [position, head, unit]
    scales: Floats  # [position, head]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last two tiles of each sequence in int8 (cache/plan.py). K or V without a tail is None."""

    k: Cells | None  # [block, panel, head, slot, unit], strided, with blocks of one tile
    v: Cells | None
    k_scale: Floats | None  # [block, panel, head, slot]
    v_scale: Floats | None
    own: dict[tuple[int, str], Rows]
    """By table row and "k" or "v": the tiles of this step's queries in one layer. `write` fills it, attention reads it.
    Tiles of equal parity share a place in the tail, and a step can have more tiles than two."""


@dataclass(frozen=True, slots=True)
class Store:
    k: Cells  # [block, panel, head, slot, unit], strided
    v: Cells
    k_scale: Cells | None  # [block, panel, head, slot], strided; with one more axis if a row has several
    v_scale: Cells | None
    codec: CodecPair
    counters: Counters
    tail: Tail | None = None

    @property
    def panel_size(self) -> int:
        return int(self.k.shape[3])

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1] * self.k.shape[3])

    @property
    def n_heads(self) -> int:
        """Stored heads: KV heads, or query heads in the repeated layout."""
        return int(self.k.shape[2])

    @property
    def arrays(self) -> list[Cells]:
        """The tail is not among them: its content never leaves the sequence."""
        return [array for array in (self.k, self.v, self.k_scale, self.v_scale) if array is not None]


class Table:
    def __init__(self, max_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = np.zeros((max_seqs, max_blocks), np.int32)  # [S, N] physical id of each resident block
        self.first = np.zeros((max_seqs, max_blocks), np.int32)  # [S, N] position of that block's slot 0, ascending
        self.n_blocks = np.zeros(max_seqs, np.int32)  # [S]
        self.kv_len = np.zeros(max_seqs, np.int32)  # [S] tokens written, this step's included
        self.q_start = np.zeros(max_seqs + 1, np.int32)  # [S + 1] sequence s has the rows q_start[s] to q_start[s + 1]
        self.cells = np.zeros(0, np.int64)  # [T] the cell of each new token; -1 is padding
        self._n_blocks, self._kv_len = self.n_blocks.data, self.kv_len.data
        self._step: tuple[list[int], list[int]] = [], []  # the rows and n_new that q_start was computed from

    def apply(self, rows: list[int], n_new: list[int], group: GroupStep) -> None:
        """The step has the sequences of these rows, in ascending order."""
        for row, start, blocks, firsts in group.edits:
            self.blocks[row, start : start + len(blocks)] = blocks
            self.first[row, start : start + len(blocks)] = firsts
        for row, held, length in zip(rows, group.n_blocks, group.kv_len, strict=True):
            self._n_blocks[row], self._kv_len[row] = held, length
        if self._step != (rows, n_new):  # most decode steps have the same rows as the step before
            counts = np.zeros(len(self.n_blocks), np.int32)
            counts[rows] = n_new
            np.cumsum(counts, out=self.q_start[1:])
            self._step = rows, n_new
        self.cells = np.array(group.cells, np.int64)


class Kernels(Protocol):
    """The kernels of a host backend. Conformance tests and `kvarn strategies` call them."""

    def write(self, k: Floats, v: Floats, store: Store, table: Table) -> None:
        """Encode this step's keys and values, [T, n_kv_heads, dim], into the cells that the table names."""

    def prefill(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        """Attention of sequences with more than one new token. q is [T, n_heads, k_dim], out [T, n_heads, v_dim]."""

    def decode(self, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float, out: Floats) -> None:
        """Attention of sequences with exactly one new token."""


class HostMemory:
    def __init__(self, plan: Plan, kernels: Kernels, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        self.plan = plan
        self.kernels = kernels
        self.counters = Counters()
        try:
            self.arena = allocate(plan.nbytes)
        except MemoryError:
            raise OutOfMemory(
                f"the cache needs {plan.nbytes:,} bytes and this machine does not give them: "
                "lower the context, the number of sequences or the cache's bytes"
            ) from None
        self.tables = [Table(plan.max_seqs, g.blocks_per_sequence, g.config.block_size) for g in plan.groups]
        self.group_of = [plan.group_of(layer) for layer in range(plan.n_layers)]
        self._own: dict[tuple[int, str], Rows] = {}
        self.stores = [self._store(layer) for layer in range(plan.n_layers)]
        self.positions = np.zeros(0, np.int32)  # [T] positions of this step's tokens

    def apply(self, step: Step) -> None:
        for group, changes in zip(self.plan.groups, step.groups, strict=True):
            if changes.moves:
                for layer in group.layers:
                    copy(changes.moves, self.stores[layer])
        for table, changes in zip(self.tables, step.groups, strict=True):
            table.apply(step.rows, step.n_new, changes)
        self.positions = np.array(step.positions, np.int32)

    # -- one layer of the current step -----------------------------------------------------------------------------

    def spec(self, layer: int) -> LayerSpec:
        """The layer's spec, with the user's window."""
        if not 0 <= layer < len(self.stores):
            raise UnknownLayer(f"layer {layer} of a model with layers 0 to {len(self.stores) - 1}")
        return self.plan.groups[self.group_of[layer]].config.spec

    def write(self, layer: int, k: Floats, v: Floats) -> None:
        """Write this step's keys and values, [T, n_kv_heads, dim] f32, into the layer's cells."""
        spec = self.spec(layer)
        self._check("k", k, spec.n_kv_heads, spec.k_dim)
        self._check("v", v, spec.n_kv_heads, spec.v_dim)
        self.kernels.write(k, v, self.stores[layer], self.tables[self.group_of[layer]])

    def attend(self, layer: int, q: Floats, scale: float | None = None) -> Floats:
        """Attention of this step's queries, [T, n_heads, k_dim] f32, over the layer's cells."""
        spec = self.spec(layer)
        self._check("q", q, spec.n_heads, spec.k_dim)
        scale = spec.k_dim**-0.5 if scale is None else scale
        return attend(self.kernels, q, self.stores[layer], self.tables[self.group_of[layer]], spec, scale)

    def _check(self, name: str, x: Any, heads: int, dim: int) -> None:
        if not len(self.positions):
            raise BadStep("no step was applied: prepare one and apply it first")
        check_rows(name, x, (len(self.positions), heads, dim))

    # -- blocks as bytes -------------------------------------------------------------------------------------------

    def read_block(self, group: int, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self._canonical(group, block))

    def write_block(self, group: int, block: int, data: bytes) -> None:
        views = list(self._canonical(group, block))
        if len(data) != sum(view.nbytes for view in views):
            raise BadArray(f"a block of this cache has {sum(v.nbytes for v in views):,} bytes, not {len(data):,}")
        at = 0
        for view in views:
            fresh = np.frombuffer(data, view.dtype, view.size, at).reshape(view.shape)
            view[...] = fresh
            at += view.nbytes
        self._repeat_heads(group, block)

    def _canonical(self, group: int, block: int) -> Iterator[Cells]:
        """Views [panel, slot, KV head, unit] of every array of every layer of the group."""
        spec = self.plan.groups[group].config.spec
        for layer in self.plan.groups[group].layers:
            store = self.stores[layer]
            for array in store.arrays:
                yield array[block, :, :: store.n_heads // spec.n_kv_heads].swapaxes(1, 2)

    def _repeat_heads(self, group: int, block: int) -> None:
        spec = self.plan.groups[group].config.spec
        for layer in self.plan.groups[group].layers:
            copies = self.stores[layer].n_heads // spec.n_kv_heads
            for array in self.stores[layer].arrays:
                for i in range(1, copies):
                    array[block, :, i::copies] = array[block, :, ::copies]

    # -- views -----------------------------------------------------------------------------------------------------

    def _store(self, layer: int) -> Store:
        group, at = self.plan.groups[self.group_of[layer]], self.plan.offsets[layer]
        codec, n_blocks, parts = self.plan.codec, group.config.n_blocks, group.parts
        return Store(
            k=self._view(parts.k, at.k, n_blocks),
            v=self._view(parts.v, at.v, n_blocks),
            k_scale=self._scales(codec.k, parts.k_scale, at.k_scale, n_blocks),
            v_scale=self._scales(codec.v, parts.v_scale, at.v_scale, n_blocks),
            codec=codec,
            counters=self.counters,
            tail=self._tail(group.tail, at) if group.tail else None,
        )

    def _tail(self, parts: Parts, at: LayerOffsets) -> Tail:
        codec, n_blocks = self.plan.codec.tails, self.plan.tail_blocks
        return Tail(
            k=self._view(parts.k, at.k_tail, n_blocks) if parts.k.shape.units else None,
            v=self._view(parts.v, at.v_tail, n_blocks) if parts.v.shape.units else None,
            k_scale=self._scales(codec.k, parts.k_scale, at.k_tail_scale, n_blocks),
            v_scale=self._scales(codec.v, parts.v_scale, at.v_tail_scale, n_blocks),
            own=self._own,
        )

    def _scales(self, codec: Codec, part: Part, offset: int, n_blocks: int) -> Cells | None:
        if not codec.scale_unit:
            return None
        scales = self._view(part, offset, n_blocks)
        return scales if codec.per_scale else scales[..., 0]

    def _view(self, part: Part, offset: int, n_blocks: int) -> Cells:
        """A view of this part of a layer in the arena."""
        shape, dtype = part.shape, np.dtype(part.unit)
        axes = (n_blocks, shape.n_panels, shape.heads, shape.panel_size, shape.units)
        region = self.arena[offset : offset + n_blocks * part.block_bytes].view(dtype)
        return as_strided(region, axes, [stride * dtype.itemsize for stride in part.strides])


def attend(kernels: Kernels, q: Floats, store: Store, table: Table, spec: LayerSpec, scale: float) -> Floats:
    """Call each kernel that has rows. Padding rows stay zero."""
    out = np.zeros((*q.shape[:2], spec.v_dim), np.float32)
    new: NDArray[np.int32] = np.diff(table.q_start)
    seconds, start = store.counters.seconds, time.perf_counter()
    if (new > 1).any():
        kernels.prefill(q, store, table, spec, scale, out)
        now = time.perf_counter()
        seconds["prefill"] += now - start
        start = now
    if (new == 1).any():
        kernels.decode(q, store, table, spec, scale, out)
        seconds["decode"] += time.perf_counter() - start
    return out


def copy(moves: Sequence[Copy], store: Store) -> None:
    for src, dst, slots in moves:
        for cells in store.arrays:
            for part in _first(slots, store.panel_size):
                cells[dst][part] = cells[src][part]
                store.counters.copied += cells[dst][part].nbytes


def _first(slots: int, panel_size: int) -> Iterator[tuple[slice | int, ...]]:
    """Indices of a block's first slots: the whole panels, then the rest."""
    panels, rest = divmod(slots, panel_size)
    if panels:
        yield (slice(panels),)
    if rest:
        yield (panels, slice(None), slice(rest))


class HostLogits:
    samples = latest = False

    def __init__(self, rows: Floats) -> None:
        self._rows = rows

    def sample(self, draws: Sequence[Draw], n_tokens: int) -> Callable[[], list[int]]:
        raise NotImplementedError("the host samples: engine/sampling.py")

    def rows(self, wanted: Sequence[int] | None = None) -> Floats:
        """Until the next step. Neighbours are not copied: those of a large batch are megabytes."""
        if wanted is None:
            return self._rows
        chosen = list(wanted)
        first = chosen[0] if chosen else 0
        neighbours = range(first, first + len(chosen))
        return self._rows[neighbours.start : neighbours.stop] if chosen == list(neighbours) else self._rows[chosen]
