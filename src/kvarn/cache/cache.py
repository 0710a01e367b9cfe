"""KVCache: the four axes put together. Storage for every layer, one placement and one table per group of layers.

All groups move or none does. The engine's step:

    reserve each sequence -> prepare -> for each layer: write, attend -> commit each sequence

Threads: open, adopt, reserve, commit, rewind, fork, free, usage and check are atomic and may be called from any
thread; prepare, write and attend belong to the one thread that runs the step.
"""

from array import array
from collections.abc import Sequence
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.base import Backend
from kvarn.cache.codec import Floats
from kvarn.cache.counters import Counters
from kvarn.cache.layout import Strides
from kvarn.cache.placement import Adoption, Placement, Residency
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.plan import CacheConfig, Group, Plan, plan
from kvarn.cache.prefix import common
from kvarn.cache.sharing import NO_SHARING, match, parting
from kvarn.cache.spec import LayerSpec
from kvarn.cache.usage import GroupMap, PrefixCount, Query, Usage
from kvarn.cache.view import Store, Table
from kvarn.errors import (
    BadArray,
    BadStep,
    BrokenInvariant,
    KvarnError,
    OutOfMemory,
    OutOfSequences,
    SequenceExists,
    UnknownLayer,
    UnknownSequence,
)


class Step(NamedTuple):
    """What `prepare` made ready. Rows of q, k and v follow `seqs`, each sequence's new tokens in order."""

    seqs: tuple[int, ...]
    positions: NDArray[np.int32]  # [T]


def _ids(tokens: Sequence[int]) -> Sequence[int]:
    """Token ids, checked where they come in: anything else would break bookkeeping half-way."""
    try:
        return array("q", tokens)
    except (TypeError, OverflowError):
        raise BadStep("tokens must be integers of at most 64 bits") from None


def _check_whole(length: int) -> None:
    if not isinstance(length, int):
        raise BadStep(f"a length of {length!r}: it must be a whole number")


class _Entry:
    """One open sequence: its table row and its residency in each group."""

    __slots__ = ("asked", "prepared", "residencies", "row")

    def __init__(self, row: int, residencies: tuple[Residency, ...]) -> None:
        self.row = row
        self.residencies = residencies
        self.prepared = 0  # tokens that a prepared step covers: what may be committed
        self.asked: Query | None = None  # what its prompt found, until something of it is computed


class KVCache:
    def __init__(self, config: CacheConfig, backend: Backend) -> None:
        self.plan: Plan = plan(config, backend.default_layout)
        self.backend = backend
        self.counters = Counters()
        try:
            self.arena = backend.allocate(self.plan.nbytes)
        except MemoryError:
            raise OutOfMemory(
                f"the cache needs {self.plan.nbytes:,} bytes and this machine does not give them: "
                "lower the context, the number of sequences or the cache's bytes"
            ) from None
        self.placements: list[Placement[Any]] = []
        self.tables: list[Table] = []
        self._group_of: dict[int, int] = {}
        for index, group in enumerate(self.plan.groups):
            self.placements.append(PLACEMENTS[self.plan.strategy.placement](group.geometry))
            self.tables.append(Table(config.max_seqs, group.blocks_per_sequence, group.geometry.block_size))
            self._group_of.update(dict.fromkeys(group.layers, index))
        self.stores = [self._store(layer) for layer in range(len(self._group_of))]
        self._lock = RLock()
        self._entries: dict[int, _Entry] = {}
        self._free_rows = list(reversed(range(config.max_seqs)))
        self._step: list[_Entry] = []  # the sequences of the prepared step
        self._new_tokens = 0  # its rows of q, k and v; 0 when it is over
        self._prefixes = PrefixCount()

    # -- sequences -----------------------------------------------------------------------------------------------

    def open(self, seq: int, salt: bytes = b"", priority: int = 0) -> None:
        """Only sequences of equal salt share prefixes. Eviction passes over what this one leaves `priority` times."""
        with self._lock:
            self._check_openable(seq)
            if not isinstance(salt, bytes):
                raise KvarnError(f"the salt is {salt!r}; it must be bytes")
            residencies = tuple(p.open(seq, salt, priority) for p in self.placements)
            self._entries[seq] = _Entry(self._free_rows.pop(), residencies)

    @property
    def shares(self) -> bool:
        """Whether a prompt can reuse what another sequence computed."""
        return all(p.shares for p in self.placements)

    def adopt(self, seq: int, tokens: Sequence[int], counted: bool = True) -> Adoption:
        """Reuse what every group still has of this prompt; at least its last token is left to compute.

        Not `counted`: a prompt that asked before and was preempted since, which is no second query."""
        with self._lock:
            entry, ids = self._entry(seq), _ids(tokens)
            found = match(self.placements, seq, ids) if self.shares else NO_SHARING
            for placement in self.placements:
                placement.adopt(seq, ids, found.reused)
            self._ask(entry, Query(len(ids), found), counted)
            return found

    def resume(self, seq: int, had: Sequence[int], tokens: Sequence[int], counted: bool = True) -> Adoption:
        """A sequence that was kept with the tokens `had` goes on as `tokens`: it returns to what both begin with, as
        far as that is intact, and at least the last token is left to compute. Any strategy can do that."""
        with self._lock:
            entry, ids = self._entry(seq), _ids(tokens)
            shared = common(had, ids[:-1])
            reused = self.rewind(seq, shared)
            found = Adoption(reused, parting(had, ids, shared, reused))
            self._ask(entry, Query(len(ids), found), counted)
            return found

    def _ask(self, entry: _Entry, query: Query, counted: bool) -> None:
        if entry.asked is not None:
            self._prefixes.take_back(entry.asked)
        entry.asked = query if counted else None
        if counted:
            self._prefixes.add(query)

    def reserve(self, seq: int, length: int) -> bool:
        """Room for `length` tokens in every group, or False and nothing changed. Raises if it can never fit."""
        _check_whole(length)
        with self._lock:
            if len(self.placements) > 1 and any(p.shortfall(seq, length) for p in self.placements):
                return False
            return all(p.reserve(seq, length) for p in self.placements)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        with self._lock:
            entry, ids = self._entry(seq), _ids(tokens)
            if entry.residencies[0].length + len(ids) > entry.prepared:
                raise BadStep(f"sequence {seq}: commit follows the prepared step that wrote these {len(ids)} tokens")
            for placement in self.placements:
                placement.commit(seq, ids)
            entry.prepared = self._new_tokens = 0
            entry.asked = None

    def rewind(self, seq: int, length: int) -> int:
        """Return to the longest length <= `length` that every group still has intact, and say which that is."""
        _check_whole(length)
        with self._lock:
            wanted = length
            while (intact := min(p.intact(seq, wanted) for p in self.placements)) < wanted:
                wanted = intact
            for placement in self.placements:
                placement.rewind(seq, wanted)
            entry = self._entry(seq)
            if entry.prepared:  # its step is void, and so is the step of those beside it
                entry.prepared = self._new_tokens = 0
            return wanted

    def fork(self, parent: int, child: int) -> bool:
        """`child` continues from the parent's committed tokens. False, and nothing changed, when there is no room."""
        with self._lock:
            self._entry(parent)
            self._check_openable(child)
            if not all(p.can_fork(parent) for p in self.placements):
                return False
            for placement in self.placements:
                placement.fork(parent, child)
            residencies = tuple(p.residency(child) for p in self.placements)
            self._entries[child] = _Entry(self._free_rows.pop(), residencies)
            return True

    def free(self, seq: int) -> int:
        """Blocks given back; 0 for a sequence that is not open, so that freeing twice is safe."""
        with self._lock:
            entry = self._entries.pop(seq, None)
            if entry is None:
                return 0
            if entry.asked is not None:  # let go before anything was computed, as while it waits for room: no query
                self._prefixes.take_back(entry.asked)
            self._free_rows.append(entry.row)  # the table may be in use: whoever gets the row next writes it anew
            return sum(p.free(seq) for p in self.placements)

    def length(self, seq: int) -> int:
        """Tokens committed."""
        return self._entry(seq).residencies[0].length

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits when it is alone: the context, or what the blocks hold."""
        return min(g.longest for g in self.plan.groups)

    # -- a step --------------------------------------------------------------------------------------------------

    def prepare(self, seqs: Sequence[int]) -> Step:
        """Run pending copies and bring the tables up to date for a step over these reserved sequences."""
        with self._lock:
            entries = {seq: self._entry(seq) for seq in seqs}
            if len(entries) != len(seqs):
                raise BadStep("a sequence stands twice in the step")
            for seq, entry in entries.items():
                if entry.residencies[0].reserved == entry.residencies[0].length:
                    raise BadStep(f"sequence {seq} has nothing reserved: reserve before prepare")
            if not entries:
                raise BadStep("a step needs at least one sequence")
            self._run_copies()
            order = sorted(entries, key=lambda seq: entries[seq].row)
            rows = [entries[seq].row for seq in order]
            for index, table in enumerate(self.tables):
                table.update(rows, [entries[seq].residencies[index] for seq in order])
            for entry in self._step:  # a step that was never finished cannot be committed any more
                entry.prepared = 0
            self._step = list(entries.values())
            for entry in self._step:
                entry.prepared = entry.residencies[0].reserved
            positions = self.tables[0].positions
            self._new_tokens = len(positions)
            return Step(tuple(order), positions)

    def write(self, layer: int, k: Floats, v: Floats) -> None:
        """This step's keys and values, [T, n_kv_heads, dim] f32, into the layer's cells; nothing else is touched."""
        group = self._check_step(layer)
        for name, x in (("k", k), ("v", v)):
            self._check_array(name, x, group.geometry.spec.n_kv_heads, group.geometry.spec.head_dim)
        self.backend.write(k, v, self.stores[layer], self.tables[self._group_of[layer]])

    def attend(self, layer: int, q: Floats, scale: float | None = None) -> Floats:
        """Attention of this step's queries, [T, n_heads, dim] f32, over the layer's cells where they lie."""
        spec = self._check_step(layer).geometry.spec
        self._check_array("q", q, spec.n_heads, spec.head_dim)
        scale = spec.head_dim**-0.5 if scale is None else scale
        return self.backend.attend(q, self.stores[layer], self.tables[self._group_of[layer]], spec, scale)

    def spec(self, layer: int) -> LayerSpec:
        """What the layer's queries may see: the model's spec under the user's window."""
        return self.plan.groups[self._group_of[layer]].geometry.spec

    # -- looking -------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                sequences=len(self._entries),
                tokens=sum(entry.residencies[0].length for entry in self._entries.values()),
                tokens_resident=max(p.n_resident for p in self.placements),
                nbytes=self.plan.nbytes,
                blocks=self.plan.n_blocks,
                blocks_used=sum(p.n_used for p in self.placements),
                blocks_cached=sum(p.n_cached for p in self.placements),
                blocks_evicted=sum(p.n_evicted for p in self.placements),
                prefix_queries=self._prefixes.queries,
                prefix_hits=self._prefixes.hits,
                prefix_misses=dict(+self._prefixes.misses),
            )

    def map(self) -> list[GroupMap]:
        """Which block holds what, group by group, at one moment."""
        with self._lock:
            pairs = zip(self.plan.groups, self.placements, strict=True)
            return [
                GroupMap(
                    group.layers,
                    group.geometry.block_size,
                    group.geometry.n_blocks,
                    placement.cached_blocks,
                    {seq: placement.blocks(seq) for seq in self._entries},
                )
                for group, placement in pairs
            ]

    def snapshot(self) -> tuple[Usage, list[GroupMap]]:
        """Both of one moment: a step may come between two looks."""
        with self._lock:
            return self.usage(), self.map()

    def check(self) -> None:
        """Raise BrokenInvariant on state that only a bug can produce."""
        with self._lock:
            for placement in self.placements:
                placement.check()
                if set(placement.sequences) != set(self._entries):
                    raise BrokenInvariant("a group has other sequences than the cache")
            rows = [entry.row for entry in self._entries.values()] + self._free_rows
            if sorted(rows) != list(range(self.plan.max_seqs)):
                raise BrokenInvariant("table rows in use and free rows are not all rows, each once")
            for seq, entry in self._entries.items():
                self._check_entry(seq, entry)

    def _check_entry(self, seq: int, entry: _Entry) -> None:
        if len({(r.length, r.reserved) for r in entry.residencies}) != 1:
            raise BrokenInvariant(f"sequence {seq} has different lengths in different groups")
        for r, table in zip(entry.residencies, self.tables, strict=True):
            known = min(r.changed, len(r.blocks))
            if (
                table.blocks[entry.row, :known].tolist() != r.blocks[:known]
                or table.first[entry.row, :known].tolist() != r.firsts[:known]
            ):
                raise BrokenInvariant(f"sequence {seq}: the table's row is stale")

    # -- inside --------------------------------------------------------------------------------------------------

    def _entry(self, seq: int) -> _Entry:
        try:
            return self._entries[seq]
        except KeyError:
            raise UnknownSequence(f"sequence {seq} is not open (never opened, or freed)") from None

    def _check_openable(self, seq: int) -> None:
        if seq in self._entries:
            raise SequenceExists(f"sequence {seq} is already open: free it first, or use another id")
        if not self._free_rows:
            raise OutOfSequences(f"all {self.plan.max_seqs} sequences are in use: free one, or raise max_seqs")

    def _check_step(self, layer: int) -> Group:
        if layer not in self._group_of:
            raise UnknownLayer(f"layer {layer} of a model with layers 0 to {len(self.stores) - 1}")
        if not self._new_tokens:
            raise BadStep("no step is prepared: call prepare first")
        return self.plan.groups[self._group_of[layer]]

    def _check_array(self, name: str, x: Any, heads: int, dim: int) -> None:
        wanted = (self._new_tokens, heads, dim)
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != wanted or not x.flags.c_contiguous:
            got = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            order = ", not contiguous" if isinstance(x, np.ndarray) and not x.flags.c_contiguous else ""
            raise BadArray(f"{name} is {got}{order}; this step takes contiguous float32 {wanted}")

    def _run_copies(self) -> None:
        for group, placement in zip(self.plan.groups, self.placements, strict=True):
            if copies := placement.copies():
                for layer in group.layers:
                    self.backend.copy(copies, self.stores[layer])

    def _store(self, layer: int) -> Store:
        """The layer's part of the arena, as strided views."""
        group, codec, layout = self.plan.groups[self._group_of[layer]], self.plan.codec, self.plan.layout
        shape, at = group.shape, self.plan.offsets[layer]
        axes = (group.geometry.n_blocks, shape.n_panels, shape.heads, shape.panel_size, shape.dim)

        def cells(offset: int, strides: Strides) -> Any:
            return self.backend.view(self.arena, offset, codec.dtype, axes, strides)

        def scales(offset: int) -> Any:
            strides = layout.scale_strides(shape)[:-1]
            return self.backend.view(self.arena, offset, np.dtype(np.float32), axes[:-1], strides)

        return Store(
            k=cells(at.k, layout.k_strides(shape)),
            v=cells(at.v, layout.v_strides(shape)),
            k_scale=scales(at.k_scale) if codec.scaled else None,
            v_scale=scales(at.v_scale) if codec.scaled else None,
            codec=codec,
            counters=self.counters,
        )
