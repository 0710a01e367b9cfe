"""The cache on the device: the arena as the plan lays it out, a table per group, and attention over them.

A table has [sequences, blocks] entries, followed by one shift per sequence (inbox.py). A step sends only
what changed. Bytes are counted from the step in closed form; a kernel counts nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvarn.arrays import Cells
from kvarn.backends.base import Counters
from kvarn.backends.cuda import inbox, specs
from kvarn.backends.cuda.buffers import Allocation, Rows, View
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.inbox import Frame, Inbox
from kvarn.cache.codec import unit_bytes
from kvarn.cache.plan import Group, Part, Plan
from kvarn.cache.spec import LayerSpec, align, ceil_div
from kvarn.cache.step import Step
from kvarn.errors import BadArray, KvarnError

NO_WINDOW = 2**31 - 1  # larger than every distance of two positions
MOST_SCRATCH = 256 << 20  # bytes for the results of splits; with more tokens, decode is launched several times
LOG2_E = 1.4426950408889634  # scores are in powers of two
MOST_IN_GRID = 65_532  # programs along the second and third axis of a launch


class CudaMemory:
    def __init__(self, driver: Device, plan: Plan) -> None:
        driver.bind()
        self.driver, self.plan = driver, plan
        self.codec = plan.codec.name
        self.counters = Counters()
        for group in plan.groups:
            if plan.max_seqs * group.blocks_per_sequence >= 2**31:
                raise KvarnError("the tables of the cache have more than 2^31 entries: lower -c or -np")
            if group.config.n_blocks * group.config.block_size >= 2**31:
                raise KvarnError("the cache has more than 2^31 cells: lower --cache-bytes")
        self.arena = Allocation(driver, plan.nbytes)
        self.group_of = [plan.group_of(layer) for layer in range(plan.n_layers)]
        self._groups = [_GroupOnDevice(driver, plan, group) for group in plan.groups]
        self._inbox = Inbox(driver, plan)
        self._scratch = Allocation(driver, max(map(self._scratch_bytes, plan.groups)))

    def _scratch_bytes(self, group: Group) -> int:
        spec = group.config.spec
        token = align(inbox.all_splits(group) * spec.n_heads, inbox.ALIGNMENT) * (specs.head_block(spec.v_dim) + 2) * 4
        return inbox.ALIGNMENT * token + min(inbox.in_bucket(self.plan.max_seqs) * token, MOST_SCRATCH)

    @property
    def movable(self) -> tuple[Allocation | None, ...]:
        """The memory that launches name by its address, as far as another cache or a larger step has another one."""
        return self.arena, self._inbox.memory

    # -- a step ----------------------------------------------------------------------------------------------------

    def apply(self, step: Step, tokens: Sequence[int] = (), wanted: Sequence[int] = ()) -> Frame:
        self.driver.bind()
        frame = self._inbox.send(step, tokens, wanted)
        for group, changes in zip(self._groups, frame.groups, strict=True):
            for moves in changes.moves:
                group.copy(moves.address, moves.length, self.arena.address)
        for group, changes in zip(self._groups, frame.groups, strict=True):
            group.edit(changes.edits.address, changes.edits.length)
        for planned, told in zip(self.plan.groups, step.groups, strict=True):
            self.counters.copied += sum(move.slots for move in told.moves) * planned.bytes_per_token
        return frame

    def count(self, frame: Frame) -> None:
        """What a program's step writes and reads."""
        self.counters.written += frame.n_tokens * self.plan.bytes_per_token
        self.counters.read += self.plan.read_bytes(frame.step)
        for name, n in (("prefill", frame.n_runs), ("decode", frame.n_singles)):
            if n:
                self.counters.calls[name] += self.plan.n_layers

    def store(
        self,
        layer: int,
        frame: Frame,
        heads: tuple[int, int],  # of q, and of k and v
        qkv: Sequence[View],
        norms: tuple[int, int, int],  # of q, of k, and the centre of k
        rope: tuple[int, int, int],  # cosines, sines, pairs
        eps: float,
        q_out: int,
    ) -> None:
        """Normalize and rotate q and k, centre k, and write k and v into the cells. Addresses of norms may be 0."""
        group, offsets = self._groups[self.group_of[layer]], self.plan.offsets[layer]
        spec, arena = group.spec, self.arena.address
        cos, sin, half = rope
        args = (
            *(x.address for x in qkv),
            *(x.stride for x in qkv),
            *(*norms, cos, sin, frame.groups[self.group_of[layer]].cells),
            *(q_out, arena + offsets.k, arena + offsets.v),
            *(*heads, group.stored_heads // spec.n_kv_heads, spec.k_dim, half, group.block_size),
            *group.strides,
            *(*(int(each != 0) for each in norms), eps),
        )
        q_programs, kv_programs = (ceil_div(n, specs.ROTATED_HEADS) for n in heads)
        grid = (frame.n_tokens, q_programs + 2 * kv_programs, 1)
        self.driver.launch(self.driver.function(specs.rotate(self.codec)), grid, args)

    def prefill(self, layer: int, frame: Frame, q: int, out: Rows, scale: float) -> None:
        """Attention of the sequences with several new tokens. q is [tokens, heads, dim] in the type of the cells; out
        has a row per token, in any form."""
        if not frame.n_runs:
            return
        group = self._groups[self.group_of[layer]]
        kernel = specs.prefill(self.codec, group.spec.k_dim)
        function, args = self.driver.function(kernel), self._arguments(layer, frame, q, scale)
        tiles = ceil_div(frame.longest_run * group.spec.n_heads // group.stored_heads, kernel.size("BM"))
        for start in range(0, frame.n_runs, MOST_IN_GRID):
            grid = (tiles, group.stored_heads, min(frame.n_runs - start, MOST_IN_GRID))
            runs = (frame.runs + 4 * start, frame.counts + 4 * start)
            self.driver.launch(function, grid, (*args, *runs, out.address, *_how(out)))

    def decode(self, layer: int, frame: Frame, q: int, out: Rows, scale: float) -> None:
        """Attention of the sequences with one new token, in splits. Tokens for which the scratch has no room take
        another launch."""
        if not frame.n_singles:
            return
        group, n_splits = self._groups[self.group_of[layer]], frame.groups[self.group_of[layer]].n_splits
        spec, partial = group.spec, self._scratch.address
        added = specs.reduce(spec.v_dim, deep=n_splits >= specs.DEEP)
        function, reduce = map(self.driver.function, (specs.decode(self.codec, spec.k_dim), added))
        args = self._arguments(layer, frame, q, scale)
        heads = group.stored_heads * ceil_div(spec.n_heads // group.stored_heads, specs.GROUP_ROWS)
        results, width = n_splits * spec.n_heads, specs.head_block(spec.v_dim)  # of one token
        room = self._scratch.nbytes // (align(results, inbox.ALIGNMENT) * (width + 2) * 4)
        at_once = min(room // inbox.ALIGNMENT * inbox.ALIGNMENT, MOST_IN_GRID)
        for start in range(0, frame.n_singles, at_once):
            n, tokens = min(frame.n_singles - start, at_once), frame.singles + 4 * start
            sums = (partial, partial + 4 * n * results * width)
            programs = specs.decode_programs(n_splits, heads * n, self.driver.processors)
            where = (out.address, *_how(out))
            self.driver.launch(function, (programs, heads, n), (*args, tokens, n_splits, *sums, *where))
            if programs > 1:
                shape = (n_splits, spec.n_heads, spec.v_dim, *_how(out), 1)
                pieces = (n, ceil_div(spec.n_heads, added.size("HEADS")), width // added.size("PIECE"))
                self.driver.launch(reduce, pieces, (*sums, tokens, out.address, *shape))

    def _arguments(self, layer: int, frame: Frame, q: int, scale: float) -> tuple[int | float, ...]:
        """What `prefill` and `decode` have in common: specs.ATTENTION."""
        group, offsets = self._groups[self.group_of[layer]], self.plan.offsets[layer]
        spec, arena = group.spec, self.arena.address
        return (
            *(q, arena + offsets.k, arena + offsets.v),
            *(group.table, group.shifts, frame.rows, frame.positions, group.width),
            *(spec.n_heads, spec.n_heads // group.stored_heads, spec.k_dim, group.block_size),
            *group.strides,
            *(NO_WINDOW if spec.window is None else spec.window, spec.pinned, group.pinned_blocks),
            scale * LOG2_E,
        )

    # -- blocks as bytes -------------------------------------------------------------------------------------------

    def read_block(self, group: int, block: int) -> bytes:
        self.driver.bind()
        found = []
        for address, part in self._parts(group, block):
            data = np.empty(part.block_bytes, np.uint8)
            self.driver.download(address, data)
            found.append(self._canonical(data, part, group).tobytes())
        return b"".join(found)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        self.driver.bind()
        parts = list(self._parts(group, block))
        spec = self.plan.groups[group].config.spec
        heads = self._groups[group].stored_heads
        sizes = [part.block_bytes * spec.n_kv_heads // heads for _, part in parts]
        if len(data) != sum(sizes):
            raise BadArray(f"a block of this cache has {sum(sizes):,} bytes, not {len(data):,}")
        at = 0
        for (address, part), size in zip(parts, sizes, strict=True):
            stored = np.zeros(part.block_bytes, np.uint8)
            for copy in range(heads // spec.n_kv_heads):
                view = self._canonical(stored, part, group, copy)
                view[...] = np.frombuffer(data, view.dtype, view.size, at).reshape(view.shape)
            self.driver.upload(address, stored)
            at += size

    def _parts(self, group: int, block: int) -> list[tuple[int, Part]]:
        parts = self.plan.groups[group].parts
        found = []
        for layer in self.plan.groups[group].layers:
            offsets = self.plan.offsets[layer]
            for offset, part in ((offsets.k, parts.k), (offsets.v, parts.v)):
                found.append((self.arena.address + offset + block * part.block_bytes, part))
        return found

    def _canonical(self, data: NDArray[np.uint8], part: Part, group: int, copy: int = 0) -> Cells:
        """A view [slot, KV head, unit] of one block; of repeated heads, the given copy."""
        shape, strides, dtype = part.shape, part.strides, np.dtype(part.unit)
        axes = (shape.block_size, shape.heads, shape.units)
        steps = [each * dtype.itemsize for each in (strides.slot, strides.head, strides.unit)]
        copies = shape.heads // self.plan.groups[group].config.spec.n_kv_heads
        return as_strided(data.view(dtype), axes, steps)[:, copy::copies]


def _how(out: Rows) -> tuple[int, int]:
    """How a kernel stores rows."""
    return out.stride, specs.FORM_CODES[out.form]


class _GroupOnDevice:
    """The table of a group of layers, and the numbers that its kernels take."""

    def __init__(self, driver: Device, plan: Plan, group: Group) -> None:
        self._driver = driver
        self.spec: LayerSpec = group.config.spec
        self.block_size = group.config.block_size
        self.pinned_blocks = group.config.pinned_blocks
        self.width = group.blocks_per_sequence
        self.stored_heads = group.parts.k.shape.heads
        k, v = group.parts.k.strides, group.parts.v.strides
        self.strides = (k.block, k.head, k.slot, v.block, v.head, v.slot)
        n_entries = inbox.first_shift(group, plan.max_seqs)
        self._memory = Allocation(driver, 4 * (n_entries + plan.max_seqs))
        driver.fill(self._memory.address, 0, self._memory.nbytes)
        self.table, self.shifts = self._memory.address, self._memory.address + 4 * n_entries
        self._unit_bytes = unit_bytes(group.parts.k.unit)
        self._units = group.parts.k.shape.units
        starts = [at // self._unit_bytes for i in group.layers for at in (plan.offsets[i].k, plan.offsets[i].v)]
        self._n_parts = len(starts)
        self._offsets = Allocation(driver, 8 * len(starts))
        driver.upload(self._offsets.address, np.array(starts, np.int64))

    def copy(self, moves: int, n_moves: int, arena: int) -> None:
        function = self._driver.function(specs.copy(self._unit_bytes))
        args = (moves, arena, self._offsets.address, self._units, *self.strides)
        self._driver.launch(function, (n_moves, self._n_parts, self.stored_heads), args)

    def edit(self, edits: int, n_edits: int) -> None:
        if n_edits:
            function = self._driver.function(specs.edit())
            self._driver.launch(function, (ceil_div(n_edits, specs.STRETCH), 1, 1), (edits, self.table, n_edits))
