"""The dictionary oracle of the cache's bookkeeping.

A `Book` drives a KVCache and stands for its device: from the steps it is given, it keeps in plain dictionaries what
every table row and every cell must hold, a cell being the identity of the token prefix that was written there. After
any operation, whatever a live sequence's next query may see must be in the cell that its blocks name. With a tail,
what it may see of its own tile must be in the tail, and a cell is written when its tile is full. Steps may be applied
and committed later, or dropped. Used by the stateful tests and by the fuzzer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.border import Border
from kvarn.cache.cache import KVCache
from kvarn.cache.cover import needed, reach
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import GroupStep, Step
from kvarn.cache.tier import Spilled
from kvarn.errors import KvarnError, UnknownSequence

FULL = LayerSpec(2, 1, 1, 1)
LOCAL = LayerSpec(2, 1, 1, 1, window=24)
SMALL = dict(context=112, block_size=16, max_chunk=20, max_seqs=5, codec="f32")
TAIL = dict(context=300, block_size=32, max_chunk=110, max_seqs=5, codec="int4")


def _paged_bytes(layers: list[LayerSpec], blocks: int) -> int:
    return blocks * len(layers) * 16 * 2 * 4  # blocks of 16 slots, K and V, one f32 each


CONFIGS: dict[str, CacheConfig] = {
    "contiguous": CacheConfig([FULL], strategy="contiguous", **(SMALL | dict(block_size=None))),
    "slab of blocks": CacheConfig([FULL], strategy="contiguous", **SMALL),
    "ring": CacheConfig([FULL], strategy="ring", window=24, **SMALL),
    "ring of one": CacheConfig([FULL], strategy="ring", window=1, **(SMALL | dict(max_chunk=1))),
    "sinks": CacheConfig([FULL], strategy="sinks", window=30, pinned=20, **SMALL),
    "sliding": CacheConfig([FULL], strategy="sliding", window=24, **SMALL),
    "sliding, pinned": CacheConfig([FULL], strategy="sliding", window=30, pinned=20, **SMALL),
    "paged": CacheConfig([FULL], strategy="paged", **SMALL),
    "paged, scarce": CacheConfig([FULL], strategy="paged", cache_bytes=_paged_bytes([FULL], 12), **SMALL),
    "paged, watermarks": CacheConfig([FULL], strategy="paged", watermarks=(0.9, 0.7), **SMALL),
    "two groups, paged": CacheConfig([LOCAL, FULL], strategy="paged", **SMALL),
    "two groups, scarce": CacheConfig([LOCAL, FULL], strategy="paged", cache_bytes=20 * 128 + 14 * 128, **SMALL),
    "two groups, slab": CacheConfig([LOCAL, FULL], strategy="contiguous", **SMALL),
    "two groups, ring": CacheConfig([LOCAL, FULL], strategy="ring", window=40, **SMALL),
    "ring, in flight": CacheConfig([FULL], strategy="ring", window=30, ahead=1, **SMALL),
    "ring of one, in flight": CacheConfig([FULL], strategy="ring", window=1, ahead=1, **(SMALL | dict(max_chunk=1))),
    "sliding, in flight": CacheConfig([FULL], strategy="sliding", window=30, ahead=5, **SMALL),
    "two groups, in flight": CacheConfig([LOCAL, FULL], strategy="paged", ahead=2, **SMALL),
    "tail, contiguous": CacheConfig([FULL], strategy="contiguous", **(TAIL | dict(block_size=None))),
    "tail, slab of blocks": CacheConfig([FULL], strategy="contiguous", **(TAIL | dict(max_chunk=40))),
    "tail, ring": CacheConfig([FULL], strategy="ring", window=24, **TAIL),
    "tail, ring of one": CacheConfig([FULL], strategy="ring", window=1, **(TAIL | dict(max_chunk=1))),
    "tail, sinks": CacheConfig([FULL], strategy="sinks", window=30, pinned=20, **TAIL),
    "tail, sliding, pinned": CacheConfig([FULL], strategy="sliding", window=40, pinned=20, **TAIL),
    "tail, paged": CacheConfig([FULL], strategy="paged", **TAIL),
    "tail, large pages": CacheConfig([FULL], strategy="paged", **(TAIL | dict(block_size=64, max_chunk=30))),
    "tail, scarce": CacheConfig([FULL], strategy="paged", cache_bytes=12 * 32 * 2 * 17 + 5 * 4608, **TAIL),
    "tail, two groups": CacheConfig([LOCAL, FULL], strategy="paged", **(TAIL | dict(codec="bf16/int6"))),
    "tail, in flight": CacheConfig([LOCAL, FULL], strategy="paged", ahead=2, **TAIL),
    "tail, ring in flight": CacheConfig([FULL], strategy="ring", window=30, ahead=40, **TAIL),
}


def refused(attempt: Callable[[], object], error: type[KvarnError]) -> None:
    try:
        attempt()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")


class Device:
    """One group's table and cells, as a step describes them."""

    def __init__(self, block_size: int, tile: int) -> None:
        self.size = block_size
        self.tile = tile
        self.rows: dict[int, list[tuple[int, int]]] = {}  # (position of slot 0, block) by row
        self.cells: dict[int, int] = {}
        self.tail: dict[tuple[int, int], int] = {}  # by row and position modulo two tiles

    def apply(self, rows: list[int], step: GroupStep) -> None:
        self.cells |= self.copied(step.moves)
        for row, start, blocks, firsts in step.edits:
            held = self.rows.setdefault(row, [])
            assert start <= len(held), "an edit leaves a gap"
            held[start:] = list(zip(firsts, blocks, strict=True))
        for row, n in zip(rows, step.n_blocks, strict=True):
            assert n <= len(self.rows[row]), "a row has fewer blocks than the step says"
            del self.rows[row][n:]

    def write(self, row: int, first: int, new: list[int], cells: list[int]) -> None:
        """New tokens of a sequence, from position `first` on, go to these cells: with a tail, when their tile is
        full."""
        if self.tile == 1:
            self.cells |= dict(zip(cells, new, strict=True))
            return
        own = [self.held(row, pos) for pos in range(first - first % self.tile, first)] + new
        begin, end = first - first % self.tile, first + len(new)
        for tile in range(begin, end - self.tile + 1, self.tile):
            last = cells[tile + self.tile - 1 - first]
            rows = own[tile - begin : tile - begin + self.tile]
            self.cells |= dict(zip(range(last - self.tile + 1, last + 1), rows, strict=True))
        for pos in range(max(first, (end - 1) // self.tile * self.tile - self.tile), end):
            self.tail[row, pos % (2 * self.tile)] = own[pos - begin]

    def held(self, row: int, pos: int) -> int | None:
        """What the tail of this row has in the place of this position."""
        return self.tail.get((row, pos % (2 * self.tile)))

    def copied(self, moves) -> dict[int, int | None]:
        """What cells hold once these moves are done."""
        found: dict[int, int | None] = {}
        for src, dst, slots in moves:
            for slot in range(slots):
                source = src * self.size + slot
                found[dst * self.size + slot] = found.get(source, self.cells.get(source))
        return found


@dataclass
class Text:
    """What one sequence holds: tokens, and for each the identity of the prefix that ends there."""

    salt: bytes
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    committed: int = 0  # of them
    row: int | None = None  # of the table, once it had a step
    kept: int = 0  # the tail must have the tiles from here on

    def extend(self, tokens) -> None:
        for token in tokens:
            self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else self.salt, token)))
            self.tokens.append(token)

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.prefixes[length:]
        self.committed = min(self.committed, length)

    def copy(self) -> "Text":
        return Text(self.salt, list(self.tokens), list(self.prefixes), self.committed)


class Book:
    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.cache = KVCache(plan(config))
        self.texts: dict[int, Text] = {}
        self.tile = self.cache.plan.tile
        self.devices = [Device(group.config.block_size, self.tile) for group in self.cache.plan.groups]
        self.size = self.cache.plan.groups[0].config.block_size
        self.shares = self.cache.shares
        self.windowed = any(group.config.spec.window is not None for group in self.cache.plan.groups)
        self.full = 0  # times that reserve answered False
        self.tier: dict[tuple[int, bytes], list[int | None]] = {}  # cells of evicted blocks, by group and hash
        self.ended: list[list[int]] = []  # texts of freed sequences, whose blocks may be in the tier
        self.planted = 0  # blocks that came back from it
        self.border = Border(self.cache, self._spilled) if self.shares else None

    # -- operations ----------------------------------------------------------------------------------------------

    def open(self, seq: int, salt: bytes = b"") -> None:
        self.cache.open(seq, salt)
        self.texts[seq] = Text(salt)

    def adopt(self, seq: int, tokens: list[int]) -> Adoption:
        text = self.texts[seq]
        expected = self._resident_elsewhere(text.salt, tokens)
        adoption = self.cache.adopt(seq, tokens)
        reused, stop = adoption
        assert 0 <= reused <= max(len(tokens) - 1, 0)
        assert reused <= stop.at or stop.reason is Reason.NOT_SHARING
        if self.shares and not self.windowed:
            assert reused >= expected, "a live sequence has these blocks"
        if not self.shares:
            assert adoption == (0, ReuseLimit(Reason.NOT_SHARING, 0))
        if stop.reason is Reason.DIFFERS:
            assert tokens[stop.at] == stop.ours != stop.theirs
        assert reused % self.tile == 0
        text.extend(tokens[:reused])
        text.committed = text.kept = reused
        return adoption

    def _spilled(self, spilled: Spilled) -> None:
        """The tier keeps the cells of each block that is evicted. A name stands for the same cells each time."""
        device = self.devices[spilled.group]
        first = spilled.block * self.size
        cells = [device.cells.get(first + slot) for slot in range(self.size)]
        assert self.tier.setdefault((spilled.group, spilled.key), cells) == cells, "one name for two contents"

    def recall(self, seq: int, tokens: list[int], most: int) -> None:
        """Before `adopt`: plant up to `most` blocks of the prompt that the tier has, as a fetch does."""
        if self.border is None:
            return
        local, groups = self.border.seek(seq, tokens)
        have = [[p.resident or (g, p.key) in self.tier for p in places] for g, places in enumerate(groups)]
        length = reach(have, self.border.configs, max(len(tokens) - 1, 0) // self.size * self.size)
        if length <= local or not self.border.hold(seq, tokens, length, spare=1):
            return
        self.cache.check()
        todo = [(i, g) for g, config in enumerate(self.border.configs) for i in needed(length, config)]
        for logical, group in sorted(todo):
            place = groups[group][logical]
            if place.resident:
                continue
            cells = self.tier[group, place.key]
            write = lambda block, g=group, cells=cells: self.devices[g].cells.update(  # noqa: E731
                (block * self.size + slot, cell) for slot, cell in enumerate(cells)
            )
            if most == 0 or not self.border.plant(seq, group, groups[group][: logical + 1], write):
                return
            most -= 1
            self.planted += 1
            self.cache.check()
        assert self.border.seek(seq, tokens)[0] >= length, "all blocks are there, and are not found"

    def _resident_elsewhere(self, salt: bytes, tokens: list[int]) -> int:
        best = 0
        for text in self.texts.values():
            if text.salt == salt:
                theirs = text.tokens[: text.committed]
                shared = next((i for i, (a, b) in enumerate(zip(theirs, tokens, strict=False)) if a != b), None)
                shared = min(len(theirs), len(tokens)) if shared is None else shared
                best = max(best, shared // self.size * self.size)
        best = min(best, len(tokens) - 1)
        return best - best % self.tile

    def step(self, batch: dict[int, list[int]], keep: float = 1.0, commit: bool = True) -> set[int]:
        """Reserve, prepare, run and advance over new tokens (only the first `keep` of them: at least one), then commit
        them, or leave that for later; the sequences for which there was room."""
        ready = self._with_tail(self._reserve(batch))
        if not ready:
            return set()
        step = self.cache.prepare(list(ready))
        self._run(step, ready)
        for seq in step.seqs:
            refused(lambda seq=seq: self.cache.fork(seq, -2), KvarnError)  # not in the middle of a step
            text = self.texts[seq]
            kept = max(1, int(keep * len(ready[seq])))
            self.cache.advance(seq, kept)
            text.cut(len(text.tokens) - len(ready[seq]) + kept)
            refused(lambda seq=seq: self.cache.advance(seq, 1), KvarnError)  # the step is over
            if commit:
                self.commit(seq)
        return set(ready)

    def _with_tail(self, ready: dict[int, list[int]]) -> dict[int, list[int]]:
        """Those of the sequences whose tail has their own tile. Others had a step that wrote more than was advanced
        over: they are refused until they return to the begin of a tile."""
        lost = [seq for seq in ready if not self._tail_holds(seq)]
        for seq in lost:
            refused(lambda seq=seq: self.cache.prepare([seq]), KvarnError)
            self.commit(seq)
            self.rewind(seq, self.texts[seq].committed)
            assert self._tail_holds(seq)
        return {seq: tokens for seq, tokens in ready.items() if seq not in lost}

    def _tail_holds(self, seq: int) -> bool:
        text = self.texts[seq]
        own = range(len(text.tokens) - len(text.tokens) % self.tile, len(text.tokens))
        return all(device.held(text.row, pos) == text.prefixes[pos] for device in self.devices for pos in own)

    def commit(self, seq: int, keep: float = 1.0) -> None:
        text = self.texts[seq]
        waiting = text.tokens[text.committed :]
        if waiting:
            some = waiting[: max(1, int(keep * len(waiting)))]
            if len(some) == 1:
                self.cache.commit_next([seq], some)
            else:
                self.cache.commit(seq, some)
            text.committed += len(some)
        if text.committed == len(text.tokens):
            refused(lambda: self.cache.commit(seq, [1]), KvarnError)
            refused(lambda: self.cache.commit_next([seq], [1]), KvarnError)

    def abandon(self, batch: dict[int, list[int]], prepare: bool) -> None:
        """Reserve, perhaps prepare and run, and never advance."""
        batch = {
            seq: tokens for seq, tokens in batch.items() if self.texts[seq].committed == len(self.texts[seq].tokens)
        }
        ready = self._with_tail(self._reserve(batch))
        if prepare and ready:
            step = self.cache.prepare(list(ready))
            for device, group in zip(self.devices, step.groups, strict=True):
                device.apply(step.rows, group)
            for seq, row, first, cells in self._parts(step):
                for device, own in zip(self.devices, cells, strict=True):
                    device.write(row, first, [-1] * len(own), own)  # written, and worth nothing
                self._written(seq, row, first, first + len(cells[0]))
        for seq in ready:  # what is reserved lapses with a rewind to where the sequence stands
            self.rewind(seq, len(self.texts[seq].tokens))

    def drop(self, batch: dict[int, list[int]]) -> None:
        """A step that is prepared and never applied takes its sequences, and those whose copies it had, with it."""
        ready = self._with_tail(self._reserve(batch))
        if ready:
            lost = self.cache.drop(self.cache.prepare(list(ready)))
            assert set(ready) <= set(lost)
            for seq in lost:
                del self.texts[seq]

    def _reserve(self, batch: dict[int, list[int]]) -> dict[int, list[int]]:
        ready = {}
        for seq, tokens in batch.items():
            before = self._state()
            try:
                if len(tokens) == 1:
                    room = self.cache.reserve_next([seq])
                else:
                    room = self.cache.reserve(seq, len(self.texts[seq].tokens) + len(tokens))
            except KvarnError:
                assert self._state() == before, "a refused reserve changed something"
                continue
            if room:
                ready[seq] = tokens
            else:
                self.full += 1
                assert self._state() == before, "a failed reserve changed something"
        return ready

    def _run(self, step: Step, ready: dict[int, list[int]]) -> None:
        """Apply the step, write its cells, and look at what its queries may see."""
        for device, group in zip(self.devices, step.groups, strict=True):
            device.apply(step.rows, group)
        positions = []
        for seq, row, first, cells in self._parts(step):
            text = self.texts[seq]
            assert len(cells[0]) == len(ready[seq])
            assert first == len(text.tokens)
            text.extend(ready[seq])
            positions += range(first, len(text.tokens))
            for device, own in zip(self.devices, cells, strict=True):
                device.write(row, first, text.prefixes[first:], own)
            self._written(seq, row, first, len(text.tokens))
        assert step.positions == positions
        for i, (seq, row) in enumerate(zip(step.seqs, step.rows, strict=True)):
            first, length = len(self.texts[seq].tokens) - step.n_new[i], len(self.texts[seq].tokens)
            for index, device in enumerate(self.devices):
                assert step.groups[index].kv_len[i] == length
                where = dict(device.rows[row])
                assert list(where) == sorted(where)
                self._verify_cells(seq, index, where, [first, length - 1], length)

    def _parts(self, step: Step) -> Iterator[tuple[int, int, int, list[list[int]]]]:
        """Sequence, row, first position and cells in each group."""
        at = 0
        for seq, row, n in zip(step.seqs, step.rows, step.n_new, strict=True):
            yield seq, row, step.positions[at], [group.cells[at : at + n] for group in step.groups]
            at += n

    def _written(self, seq: int, row: int, first: int, end: int) -> None:
        text, last_two = self.texts[seq], (end - 1) // self.tile * self.tile - self.tile
        text.row, text.kept = row, max(min(text.kept, first), last_two)

    def rewind(self, seq: int, length: int) -> int:
        reached, text = self.cache.rewind(seq, length), self.texts[seq]
        begun = length - length % self.tile
        assert reached <= length
        if not self.windowed:
            assert reached == (length if begun >= text.kept else begun)
        text.cut(reached)
        text.kept = min(text.kept, reached)
        return reached

    def fork(self, parent: int, child: int) -> bool:
        before = self._state()
        if self.texts[parent].committed < len(self.texts[parent].tokens):
            refused(lambda: self.cache.fork(parent, child), KvarnError)
            assert self._state() == before
            return False
        if not self.cache.fork(parent, child):
            assert self._state() == before
            return False
        text, length = self.texts[parent].copy(), self.cache.length(child)
        begun = len(text.tokens) - len(text.tokens) % self.tile
        assert length == begun or (self.windowed and length < begun and length % self.tile == 0)
        text.cut(length)
        text.kept = length
        self.texts[child] = text
        return True

    def free(self, seq: int) -> None:
        self.cache.free(seq)
        self.ended.append(self.texts.pop(seq).tokens)

    def misuse(self, seq: int) -> None:
        """Errors are typed and change nothing."""
        before = self._state()
        length = len(self.texts[seq].tokens)
        for attempt in (
            lambda: self.cache.open(seq),
            lambda: self.cache.fork(seq, seq),
            lambda: self.cache.reserve(seq, length),
            lambda: self.cache.reserve(seq, self.config.context + 1),
            lambda: self.cache.reserve(seq, length + self.config.max_chunk + 1),
            lambda: self.cache.commit(seq, [1] * (self.config.context + 1)),
            lambda: self.cache.advance(seq, 1),
            lambda: self.cache.rewind(seq, length + 1),
            lambda: self.cache.rewind(seq, -1),
        ):
            refused(attempt, KvarnError)
        for attempt in (
            lambda: self.cache.reserve(-1, 1),
            lambda: self.cache.adopt(-1, [1]),
            lambda: self.cache.prepare([-1]),
        ):
            refused(attempt, UnknownSequence)
        assert self.cache.free(-1) == 0
        assert self._state() == before, "a misuse changed something"

    # -- verification --------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.cache.check()
        for seq in self.texts:
            self.verify(seq)
        if not self.texts:
            assert self.cache.usage().blocks_used == 0, "blocks are leaked"

    def verify(self, seq: int) -> None:
        """Everything that the next query, or one of a step in flight, may see is where the placement says."""
        text = self.texts[seq]
        assert self.cache.length(seq) == text.committed
        for index, placement in enumerate(self.cache.placements):
            where = {first: block for block, first in placement.blocks(seq)}
            self._verify_cells(seq, index, where, [text.committed, len(text.tokens)], len(text.tokens))
        if len(text.tokens) - len(text.tokens) % self.tile >= text.kept:
            assert self._tail_holds(seq), f"sequence {seq}: the tail has something else"

    def _verify_cells(self, seq: int, index: int, where: dict[int, int], queries: list[int], length: int) -> None:
        placement, device, prefixes = self.cache.placements[index], self.devices[index], self.texts[seq].prefixes
        pending = device.copied(placement.pending_copies)  # they run before the next step: as good as done
        pos = np.arange(length)
        seen = np.zeros(length, bool)
        for query in queries:
            seen |= placement.spec.visible(query, pos) & ((self.tile == 1) | (pos < query - query % self.tile))
        for p in np.flatnonzero(seen).tolist():
            first = p - p % self.size
            cell = where[first] * self.size + p - first
            found = pending[cell] if cell in pending else device.cells.get(cell)
            assert found == prefixes[p], f"sequence {seq}: position {p} holds something else"

    def _state(self) -> tuple:
        return tuple(
            (
                p.n_used,
                p.n_cached,
                p.n_evicted,
                p.pending_copies,
                [(seq, p.blocks(seq), r.committed, r.length, r.reserved) for seq, r in p.sequences.items()],
            )
            for p in self.cache.placements
        )
