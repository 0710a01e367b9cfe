"""The cells of one sequence, out of a cache and into another one.

Cells are in canonical order: by position, then KV head, then unit. So the cache that gives them and the cache that
takes them may differ in strategy, layout and block size. A sequence with a window has cells only of the positions that
its next tokens can see; the others are its *hole*. Of a codec with a tail, only whole tiles have cells: the tokens
after the last of them are computed again.

Restoring is all or nothing: cells go to blocks of a new sequence, which nobody else can find before they are committed,
and each block is read back. Non-goals: files (snapshot.py); whether these cells may be used (fingerprint.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvarn.arrays import Bytes
from kvarn.backends.base import Memory
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import unit_bytes
from kvarn.cache.holes import sees, sees_whole_blocks
from kvarn.cache.plan import Group, Plan
from kvarn.errors import BadSnapshot, KvarnError, NoRoomNow
from kvarn.words import counted

PARTS = ("k", "v", "k_scale", "v_scale")
FULL = range(0)  # no hole


class Field(NamedTuple):
    """One array of one layer: a row per position."""

    layer: int
    part: str  # of PARTS
    unit: str  # as NumPy names it
    heads: int
    units: int

    @property
    def name(self) -> str:
        return f"{self.part}.{self.layer}"

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.heads * self.units * unit_bytes(self.unit)


def fields_of(group: Group) -> list[Field]:
    """In the order of a block in `Memory.read_block`."""
    heads = group.config.spec.n_kv_heads
    rows = [(name, part) for name, part in zip(PARTS, group.parts.each, strict=True) if part.shape.units]
    return [Field(layer, name, part.unit, heads, part.shape.units) for layer in group.layers for name, part in rows]


@dataclass(frozen=True)
class Cells:
    """`rows` are [positions, bytes], by name of the field. holes[i] are the positions that layer i lacks."""

    n: int  # tokens that have cells, or are in a hole
    holes: tuple[range, ...]
    rows: dict[str, Bytes]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.rows.values())


def take(cache: KVCache, memory: Memory, seq: int) -> Cells:
    """The cells of all committed tokens of a sequence, or of whole tiles of them."""
    plan, n = cache.plan, whole_tiles(cache.plan, cache.length(seq))
    rows: dict[str, Bytes] = {}
    holes = [FULL] * plan.n_layers
    for index, group in enumerate(plan.groups):
        placement, size, fields = cache.placements[index], group.config.block_size, fields_of(group)
        lacks = placement.residency(seq).hole
        spans = [
            (block, span.start - first, span)
            for block, first in placement.blocks(seq)
            for span in _without(range(first, min(first + size, n)), lacks)
        ]
        hole = _hole([span for *_, span in spans], n)
        holes = [hole if layer in group.layers else each for layer, each in enumerate(holes)]
        found = {field.name: np.empty((n - len(hole), field.width), np.uint8) for field in fields}
        at = 0
        for block, slot, span in spans:
            for field, whole in parts_of_block(fields, size, memory.read_block(index, block)):
                found[field.name][at : at + len(span)] = whole[slot : slot + len(span)]
            at += len(span)
        rows |= found
    return Cells(n, tuple(holes), rows)


def whole_tiles(plan: Plan, n: int) -> int:
    """How many of the first n tokens of a text have cells outside of a tail."""
    return n - n % plan.tile


def check_fits(cache: KVCache, n: int, holes: Sequence[range]) -> None:
    """Raise BadSnapshot if n tokens with these holes can never be restored here."""
    n_cells = whole_tiles(cache.plan, n)
    if n >= cache.longest:
        raise BadSnapshot(f"it has {counted(n, 'token')} and the cache holds {cache.longest:,}: raise the context (-c)")
    for group in cache.plan.groups:
        hole, config = _joined(group, holes), group.config
        spec, size = config.spec, config.block_size
        cut = cache.shares and not sees_whole_blocks(spec, size, config.pinned_blocks, n_cells, hole)
        if sees(spec, hole, n_cells) or cut:
            raise BadSnapshot(
                f"it has no cells of the tokens {hole.start:,} to {hole.stop:,}, and blocks of {size} tokens here need "
                "some of them: lower the block size, or use the strategy that made it"
            )


def lack_of(cache: KVCache, n: int) -> str:
    """Why n tokens have no room now; empty if they have."""
    if lacking := cache.lacks(n):
        return f"no room now for {counted(n, 'token')}: {counted(lacking, 'block')} more must be free; try again"
    return "" if cache.n_rows_free else "no room now: all sequences are in use; try again"


def restore(cache: KVCache, memory: Memory, seq: int, tokens: Sequence[int], cells: Cells) -> None:
    """Write the cells to an open, empty sequence. If it raises, nothing of the sequence is left."""
    plan = cache.plan
    groups = [_Writer(memory, i, group, cells) for i, group in enumerate(plan.groups)]
    holes = [group.hole for group in groups]
    try:
        for start in range(0, cells.n, plan.max_chunk):
            chunk = tokens[start : min(start + plan.max_chunk, cells.n)]
            if not cache.reserve(seq, start + len(chunk)):
                raise NoRoomNow(f"no room now for {counted(cells.n, 'token')}: try again")
            _apply(cache, memory, seq)
            for group, placement in zip(groups, cache.placements, strict=True):
                group.write(placement.blocks(seq), start)
            cache.restored(seq, chunk, holes)
    except BaseException:
        cache.abandon(seq)
        raise


def _apply(cache: KVCache, memory: Memory, seq: int) -> None:
    step = cache.prepare([seq])
    try:
        memory.apply(step)
    except BaseException:
        cache.abandon(seq)
        cache.drop(step)
        raise


class _Writer:
    """Writes the blocks of one group, each once."""

    def __init__(self, memory: Memory, index: int, group: Group, cells: Cells) -> None:
        self._memory, self._index, self._cells = memory, index, cells
        self._size, self._fields = group.config.block_size, fields_of(group)
        self.hole = _joined(group, cells.holes)
        self._done = -1  # position of the last block that was written

    def write(self, blocks: Sequence[tuple[int, int]], start: int) -> None:
        for block, first in blocks:
            if first > self._done and first + self._size > start and self._holds(first):
                data = b"".join(self._bytes(first))
                self._memory.write_block(self._index, block, data)
                if self._memory.read_block(self._index, block) != data:
                    raise KvarnError("the cache did not keep what was written to it: its memory is damaged")
                self._done = first

    def _holds(self, first: int) -> bool:
        return bool(_without(range(first, min(first + self._size, self._cells.n)), self.hole))

    def _bytes(self, first: int) -> Iterator[bytes]:
        spans = _without(range(first, min(first + self._size, self._cells.n)), self.hole)
        for field in self._fields:
            hole, rows = self._cells.holes[field.layer], self._cells.rows[field.name]
            whole = np.zeros((self._size, field.width), np.uint8)
            for span in spans:
                at = span.start - (len(hole) if span.start >= hole.stop else 0)
                whole[span.start - first : span.stop - first] = rows[at : at + len(span)]
            yield whole.tobytes()


def parts_of_block(fields: Sequence[Field], size: int, data: bytes) -> Iterator[tuple[Field, Bytes]]:
    """The arrays of one block, [slots, bytes] each."""
    raw, at = np.frombuffer(data, np.uint8), 0
    for field in fields:
        yield field, raw[at : at + size * field.width].reshape(size, field.width)
        at += size * field.width


def _without(span: range, hole: range) -> list[range]:
    parts = (range(span.start, min(span.stop, hole.start)), range(max(span.start, hole.stop), span.stop))
    return [part for part in (parts if hole else (span,)) if part]


def _hole(spans: Sequence[range], n: int) -> range:
    """The positions below n in none of these ascending spans. Only a window makes one, between pinned and newest."""
    end = 0
    for span in spans:
        if span.start > end:
            return range(end, span.start)
        end = span.stop
    assert end == n, "a sequence lacks cells of its newest tokens"
    return FULL


def _joined(group: Group, holes: Sequence[range]) -> range:
    """A hole that has those of all layers of the group."""
    found = [holes[layer] for layer in group.layers if holes[layer]]
    return range(min(hole.start for hole in found), max(hole.stop for hole in found)) if found else FULL
