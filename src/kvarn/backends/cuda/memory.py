"""The cache on the device: the arena as the plan lays it out, a table per group, and attention over them.

A table has [sequences, blocks] entries. A step sends only what changed. Bytes are counted from the step in
closed form; a kernel counts nothing.

With a codec that has a tail, the int8 rows of single tokens are written into the tail. Those of a step with
several tokens of a sequence go into a room beside it, because attention still reads what is in the tail. `keep`
brings the last ones of them into it afterwards.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvarn.arrays import Cells
from kvarn.backends.base import Counters
from kvarn.backends.cuda import inbox, specs
from kvarn.backends.cuda.buffers import Allocation, Rows, View
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.inbox import Frame, Inbox
from kvarn.cache.codec import TILE, Codec, unit_bytes
from kvarn.cache.plan import Group, Part, Parts, Plan
from kvarn.cache.spec import LayerSpec, align, ceil_div
from kvarn.cache.step import Step
from kvarn.errors import BadArray, KvarnError

NO_WINDOW = 2**31 - 1  # larger than every distance of two positions
MOST_SCRATCH = 256 << 20  # bytes for the results of splits; with more tokens, decode is launched several times
LOG2_E = 1.4426950408889634  # scores are in powers of two
ROTATED = 32  # numbers that are rotated together; products of what is rotated are larger by it
MOST_IN_GRID = 65_532  # programs along the second and third axis of a launch


class CudaMemory:
    def __init__(self, driver: Device, plan: Plan) -> None:
        driver.bind()
        self.driver, self.plan = driver, plan
        self._codec = plan.codec.name
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
        self._new: Allocation | None = None  # int8 rows of a step beside the tail
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
        if frame.n_runs:
            self._make_room(frame.n_tokens)
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
        self.counters.written += sum(len(g.layers) * written_bytes(g, frame.step) for g in self.plan.groups)
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
        cells = frame.groups[self.group_of[layer]].cells
        given = (*(x.address for x in qkv), *(x.stride for x in qkv), *norms, cos, sin, cells)
        stored = (arena + offsets.k, arena + offsets.v)
        copies, flags = group.stored_heads // spec.n_kv_heads, (*(int(each != 0) for each in norms), eps)
        q_programs, kv_programs = (ceil_div(n, specs.ROTATED_HEADS) for n in heads)
        grid = (frame.n_tokens, q_programs + 2 * kv_programs, 1)
        if self._codec in specs.TYPES:
            args = (*given, q_out, *stored, *heads, copies, spec.k_dim, half, group.block_size, *group.rows, *flags)
            self.driver.launch(self.driver.function(specs.rotate(self._codec)), grid, args)
            return
        around = (*stored, *self._scales(layer), *self._tails(layer), *self._news(group), self._inbox.near)
        sizes = (*heads, copies, spec.k_dim, *group.widths, half, group.block_size)
        where = (*group.rows, *group.tail_rows, *group.codecs)
        args = (*given, frame.places, q_out, *around, *sizes, *where, *flags)
        self.driver.launch(self.driver.function(specs.encode()), grid, args)
        if group.tailed and heads[1] and frame.fills:
            step = (frame.positions, frame.rows, cells, frame.places)
            args = (*step, *around, group.stored_heads, *group.widths, group.block_size, *where)
            grid = (frame.n_tokens, 2 * group.stored_heads, 1)
            self.driver.launch(self.driver.function(specs.pack()), grid, args)

    def keep(self, layer: int, frame: Frame) -> None:
        """Bring the last rows of this step into the tail. Attention of the step has been launched."""
        group = self._groups[self.group_of[layer]]
        if group.tailed and frame.n_runs:
            sizes = (group.stored_heads, *group.widths)
            args = (frame.kept, *self._tails(layer), *self._news(group), *sizes, *group.tail_rows, *group.codecs)
            grid = (frame.n_tokens, 2 * group.stored_heads, 1)
            self.driver.launch(self.driver.function(specs.keep()), grid, args)

    def _scales(self, layer: int) -> list[int]:
        """Addresses of the scales of K and V, or 0."""
        at, parts = self.plan.offsets[layer], self.plan.groups[self.group_of[layer]].parts
        return self._there((at.k_scale, at.v_scale), (parts.k_scale, parts.v_scale))

    def _tails(self, layer: int) -> list[int]:
        """Addresses of the tail: K, V and their scales. 0: there is none."""
        at, tail = self.plan.offsets[layer], self.plan.groups[self.group_of[layer]].tail
        if tail is None:
            return [0, 0, 0, 0]
        return self._there((at.k_tail, at.v_tail, at.k_tail_scale, at.v_tail_scale), tail.each)

    def _there(self, starts: Sequence[int], parts: Sequence[Part]) -> list[int]:
        return [self.arena.address + at if part.block_bytes else 0 for at, part in zip(starts, parts, strict=True)]

    def _news(self, group: "_GroupOnDevice") -> list[int]:
        """The same beside the tail, or zeros if no step has needed it."""
        if self._new is None or not group.tailed:
            return [0, 0, 0, 0]
        n_blocks = self._new.nbytes // max(each.new_bytes for each in self._groups)
        starts = accumulate((n_blocks * size for size in group.tail_parts[:-1]), initial=self._new.address)
        return [at if size else 0 for at, size in zip(starts, group.tail_parts, strict=True)]

    def _make_room(self, n_tokens: int) -> None:
        """For the int8 rows of this many tokens of one layer."""
        block = max(each.new_bytes for each in self._groups)
        n_bytes = ceil_div(n_tokens, TILE) * block
        if n_bytes > (0 if self._new is None else self._new.nbytes):
            self.driver.synchronize()  # an earlier step may still use the smaller one
            self._new = Allocation(self.driver, n_bytes)

    def prefill(self, layer: int, frame: Frame, q: int, out: Rows, scale: float) -> None:
        """Attention of the sequences with several new tokens. q is [tokens, heads, dim] in the type of the cells; out
        has a row per token, in any form."""
        if not frame.n_runs:
            return
        group = self._groups[self.group_of[layer]]
        kernel = specs.prefill(self._codec, group.spec.k_dim)
        function, args = self.driver.function(kernel), self._arguments(layer, frame, q, scale)
        tiles = ceil_div(frame.longest_run * group.spec.n_heads // group.stored_heads, kernel.size("BM"))
        for start in range(0, frame.n_runs, MOST_IN_GRID):
            grid = (tiles, group.stored_heads, min(frame.n_runs - start, MOST_IN_GRID))
            runs = (frame.runs + 4 * start, frame.counts + 4 * start)
            self.driver.launch(function, grid, (*args, *self._news(group), *runs, out.address, *_how(out)))

    def decode(self, layer: int, frame: Frame, q: int, out: Rows, scale: float) -> None:
        """Attention of the sequences with one new token, in splits. Tokens for which the scratch has no room take
        another launch."""
        if not frame.n_singles:
            return
        group, n_splits = self._groups[self.group_of[layer]], frame.groups[self.group_of[layer]].n_splits
        spec, partial = group.spec, self._scratch.address
        added = specs.reduce(deep=n_splits > specs.DEEP)
        function, reduce = map(self.driver.function, (specs.decode(self._codec, spec.k_dim), added))
        args = self._arguments(layer, frame, q, scale)
        heads = group.stored_heads * ceil_div(spec.n_heads // group.stored_heads, specs.GROUP_ROWS)
        results, width = n_splits * spec.n_heads, specs.head_block(spec.v_dim)  # of one token
        room = self._scratch.nbytes // (align(results, inbox.ALIGNMENT) * (width + 2) * 4)
        at_once = min(room // inbox.ALIGNMENT * inbox.ALIGNMENT, MOST_IN_GRID)
        for start in range(0, frame.n_singles, at_once):
            n, tokens = min(frame.n_singles - start, at_once), frame.singles + 4 * start
            sums = (partial, partial + 4 * n * results * width)
            programs = specs.decode_programs(n_splits, heads * n, self.driver.processors)
            first = start if frame.n_singles == frame.n_tokens else -1
            where = (out.address, *_how(out))
            self.driver.launch(function, (programs, heads, n), (*args, tokens, first, n_splits, *sums, *where))
            if programs > 1:
                shape = (n_splits, spec.n_heads, spec.v_dim, group.widths[1], *_how(out), group.turned[1], width)
                pieces = (n, spec.n_heads, width // specs.REDUCED)
                self.driver.launch(reduce, pieces, (*sums, tokens, out.address, *shape))

    def _arguments(self, layer: int, frame: Frame, q: int, scale: float) -> tuple[int | float, ...]:
        """What `prefill` and `decode` have in common: specs.ATTENTION."""
        group, offsets = self._groups[self.group_of[layer]], self.plan.offsets[layer]
        spec, arena = group.spec, self.arena.address
        return (
            *(q, arena + offsets.k, arena + offsets.v, *self._scales(layer), *self._tails(layer)),
            *(group.table, frame.groups[self.group_of[layer]].shifts, frame.rows, frame.positions, group.width),
            *(spec.n_heads, spec.n_heads // group.stored_heads, spec.k_dim, *group.widths, group.block_size),
            *(*group.rows, *group.tail_rows, *group.codecs),
            *(NO_WINDOW if spec.window is None else spec.window, spec.pinned, group.pinned_blocks),
            scale * LOG2_E / (ROTATED if group.turned[0] else 1),
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
            starts = (offsets.k, offsets.v, offsets.k_scale, offsets.v_scale)
            for offset, part in zip(starts, parts.each, strict=True):
                if part.block_bytes:
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


def written_bytes(group: Group, step: Step) -> int:
    """What a step writes in one layer: cells, or int8 rows and the cells of the tiles that they fill."""
    n, tails = len(step.positions), group.tail.token_bytes if group.tail else (0, 0)
    filled = TILE * sum(position % TILE == TILE - 1 for position in step.positions) if group.tail else 0
    return sum(
        n * tail + filled * row if tail else n * row for row, tail in zip(group.parts.token_bytes, tails, strict=True)
    )


def query_width(n_heads: int, dim: int) -> int:
    """Numbers of f32 that the queries of a token have room in, whatever the cells: rotated ones are padded."""
    return n_heads * max(dim, align(dim, ROTATED) // 2)


def _width(codec: Codec, dim: int) -> int:
    """Numbers of a row: codes are padded to whole blocks."""
    return align(dim, codec.block)


def _row_strides(parts: Parts) -> tuple[int, int, int]:
    """Of blocks, heads and slots, counted in rows: in the layouts of this backend, arrays differ in the size of a row
    alone."""
    found = {
        tuple(getattr(part.strides, name) // part.shape.units for name in ("block", "head", "slot"))
        for part in parts.each
        if part.shape.units
    }
    (strides,) = found
    return strides


def _starts_and_sizes(plan: Plan, group: Group) -> list[tuple[int, int]]:
    """Of the arrays of all layers: where each starts, and bytes of a row."""
    found = []
    for layer in group.layers:
        at = plan.offsets[layer]
        for start, part in zip((at.k, at.v, at.k_scale, at.v_scale), group.parts.each, strict=True):
            if part.shape.units:
                size = part.shape.units * unit_bytes(part.unit)
                assert start % 4 == 0
                assert size <= specs.SHORT_ROW or size % 4 == 0
                found.append((start, size))
    return found


class _GroupOnDevice:
    """The table of a group of layers, and the numbers that its kernels take."""

    def __init__(self, driver: Device, plan: Plan, group: Group) -> None:
        self._driver = driver
        self.spec: LayerSpec = group.config.spec
        self.block_size = group.config.block_size
        self.pinned_blocks = group.config.pinned_blocks
        self.width = group.blocks_per_sequence
        self.stored_heads = group.parts.k.shape.heads
        self.rows = _row_strides(group.parts)
        self.tailed = group.tail is not None
        self.tail_rows = (0, 0, 0) if group.tail is None else _row_strides(group.tail)
        self.tail_parts = [] if group.tail is None else [part.block_bytes for part in group.tail.each]
        self.new_bytes = sum(self.tail_parts)  # of a block beside the tail
        self.turned = [int(codec.name in specs.CODED) for codec in (plan.codec.k, plan.codec.v)]
        self.widths = _width(plan.codec.k, self.spec.k_dim), _width(plan.codec.v, self.spec.v_dim)
        self.codecs = tuple(specs.CODEC_CODES.get(codec.name, 0) for codec in (plan.codec.k, plan.codec.v))
        self._memory = Allocation(driver, 4 * plan.max_seqs * group.blocks_per_sequence)
        driver.fill(self._memory.address, 0, self._memory.nbytes)
        self.table = self._memory.address
        arrays = np.array(_starts_and_sizes(plan, group), np.int64)
        self._n_arrays, self._arrays = len(arrays), Allocation(driver, arrays.nbytes)
        driver.upload(self._arrays.address, arrays)

    def copy(self, moves: int, n_moves: int, arena: int) -> None:
        args = (moves, arena, self._arrays.address, *self.rows)
        grid = (n_moves, self._n_arrays, self.stored_heads)
        self._driver.launch(self._driver.function(specs.copy()), grid, args)

    def edit(self, edits: int, n_edits: int) -> None:
        if n_edits:
            function = self._driver.function(specs.edit())
            self._driver.launch(function, (ceil_div(n_edits, specs.STRETCH), 1, 1), (edits, self.table, n_edits))
