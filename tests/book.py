"""The dictionary oracle of the cache's bookkeeping.

A `Book` drives a KVCache without kernels and keeps, in plain dictionaries, what every cell must hold: the identity of
the token prefix that was written there. After any operation, whatever a live sequence's next query may see must be in
the cell that its blocks name. Used by the stateful tests and by the fuzzer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.placement import Adoption, Reason, Stop
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError, UnknownSequence

FULL = LayerSpec(2, 1, 1)
LOCAL = LayerSpec(2, 1, 1, window=24)
SMALL = dict(context=112, block_size=16, max_chunk=20, max_seqs=5, codec="f32")


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
}


def refused(attempt: Callable[[], object], error: type[KvarnError]) -> None:
    try:
        attempt()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")


class Recorder(Reference):
    """A backend that moves nothing and remembers which copies it was asked for."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, tuple]] = []  # (id of the store, copy)

    def copy(self, copies, store) -> None:
        self.copied += [(id(store), copy) for copy in copies]


@dataclass
class Text:
    """What one sequence holds: tokens, and for each the identity of the prefix that ends there."""

    salt: bytes
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def extend(self, tokens) -> None:
        for token in tokens:
            self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else self.salt, token)))
            self.tokens.append(token)

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.prefixes[length:]

    def copy(self) -> "Text":
        return Text(self.salt, list(self.tokens), list(self.prefixes))


class Book:
    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.backend = Recorder()
        self.cache = KVCache(config, self.backend)
        self.texts: dict[int, Text] = {}
        self.cells: list[dict[int, int]] = [{} for _ in self.cache.placements]
        self.size = self.cache.plan.groups[0].geometry.block_size
        self.paged = self.cache.plan.strategy.placement == "paged"
        self.windowed = any(group.geometry.spec.window is not None for group in self.cache.plan.groups)
        self.full = 0  # times that reserve answered False

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
        if self.paged and not self.windowed:
            assert reused >= expected, "a live sequence has these blocks"
        if not self.paged:
            assert adoption == (0, Stop(Reason.NOT_SHARING, 0))
        if stop.reason is Reason.DIFFERS:
            assert tokens[stop.at] == stop.ours != stop.theirs
        text.extend(tokens[:reused])
        return adoption

    def _resident_elsewhere(self, salt: bytes, tokens: list[int]) -> int:
        best = 0
        for text in self.texts.values():
            if text.salt == salt:
                shared = next((i for i, (a, b) in enumerate(zip(text.tokens, tokens, strict=False)) if a != b), None)
                shared = min(len(text.tokens), len(tokens)) if shared is None else shared
                best = max(best, shared // self.size * self.size)
        return min(best, len(tokens) - 1)

    def step(self, batch: dict[int, list[int]], keep: float = 1.0) -> set[int]:
        """Reserve, prepare and commit new tokens (only the first `keep` of them: at least one); the sequences for
        which there was room."""
        ready = {}
        for seq, tokens in batch.items():
            before = self._state()
            try:
                room = self.cache.reserve(seq, len(self.texts[seq].tokens) + len(tokens))
            except KvarnError:
                assert self._state() == before, "a refused reserve changed something"
                continue
            if room:
                ready[seq] = tokens
            else:
                self.full += 1
                assert self._state() == before, "a failed reserve changed something"
        if not ready:
            return set()
        step = self.cache.prepare(list(ready))
        self._apply_copies()
        at = 0
        for seq in step.seqs:
            tokens, text = ready[seq], self.texts[seq]
            start = len(text.tokens)
            text.extend(tokens)
            n = len(tokens)
            assert step.positions[at : at + n].tolist() == list(range(start, start + n))
            for cells, table in zip(self.cells, self.cache.tables, strict=True):
                for slot, prefix in zip(table.slots[at : at + n].tolist(), text.prefixes[start:], strict=True):
                    cells[slot] = prefix
            at += n
        for seq in step.seqs:  # what this step's kernels may see, by the tables they read
            self._verify_rows(seq, len(self.texts[seq].tokens) - len(ready[seq]))
        for seq in step.seqs:
            refused(lambda seq=seq: self.cache.fork(seq, -2), KvarnError)  # not in the middle of a step
            kept = ready[seq][: max(1, int(keep * len(ready[seq])))]
            self.cache.commit(seq, kept)
            self.texts[seq].cut(len(self.texts[seq].tokens) - len(ready[seq]) + len(kept))
            refused(lambda seq=seq: self.cache.commit(seq, [1]), KvarnError)  # the step is over
        return set(ready)

    def abandon(self, batch: dict[int, list[int]], prepare: bool) -> None:
        """Reserve, perhaps prepare and write, and never commit."""
        ready = {}
        for seq, tokens in batch.items():
            try:
                if self.cache.reserve(seq, len(self.texts[seq].tokens) + len(tokens)):
                    ready[seq] = tokens
            except KvarnError:
                continue
        if prepare and ready:
            self.cache.prepare(list(ready))
            self._apply_copies()
            for cells, table in zip(self.cells, self.cache.tables, strict=True):
                cells.update(dict.fromkeys(table.slots.tolist(), -1))  # written, and worth nothing
        for seq in ready:  # what is reserved lapses with a rewind to where the sequence stands
            assert self.cache.rewind(seq, len(self.texts[seq].tokens)) == len(self.texts[seq].tokens)

    def rewind(self, seq: int, length: int) -> int:
        reached = self.cache.rewind(seq, length)
        assert reached <= length
        if not self.windowed:
            assert reached == length
        self.texts[seq].cut(reached)
        return reached

    def fork(self, parent: int, child: int) -> bool:
        before = self._state()
        if not self.cache.fork(parent, child):
            assert self._state() == before
            return False
        self.texts[child] = self.texts[parent].copy()
        return True

    def free(self, seq: int) -> None:
        self.cache.free(seq)
        del self.texts[seq]

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
        """Everything that the next query may see is where the placement says."""
        self._apply_copies_early()
        text = self.texts[seq]
        length = len(text.tokens)
        assert self.cache.length(seq) == length
        for index, placement in enumerate(self.cache.placements):
            where = {first: block for block, first in placement.blocks(seq)}
            self._verify_cells(seq, index, where, [length], length)

    def _verify_rows(self, seq: int, first: int) -> None:
        row = self.cache._entries[seq].row
        length = len(self.texts[seq].tokens)
        for index, table in enumerate(self.cache.tables):
            n = table.n_blocks[row]
            assert table.kv_len[row] == length
            assert table.q_start[row + 1] - table.q_start[row] == length - first
            where = dict(zip(table.first[row, :n].tolist(), table.blocks[row, :n].tolist(), strict=True))
            assert list(where) == sorted(where)
            self._verify_cells(seq, index, where, [first, length - 1], length)

    def _verify_cells(self, seq: int, index: int, where: dict[int, int], queries: list[int], length: int) -> None:
        spec, cells, prefixes = self.cache.placements[index].spec, self.cells[index], self.texts[seq].prefixes
        pos = np.arange(length)
        seen = np.zeros(length, bool)
        for query in queries:
            seen |= spec.visible(query, pos)
        for p in np.flatnonzero(seen).tolist():
            first = p - p % self.size
            cell = where[first] * self.size + p - first
            assert cells.get(cell) == prefixes[p], f"sequence {seq}: position {p} holds something else"

    def _apply_copies(self) -> None:
        stores = {id(self.cache.stores[g.layers[0]]): i for i, g in enumerate(self.cache.plan.groups)}
        for store, (src, dst, slots) in self.backend.copied:
            if store in stores:
                cells = self.cells[stores[store]]
                for slot in range(slots):
                    cells[dst * self.size + slot] = cells[src * self.size + slot]
        self.backend.copied.clear()

    def _apply_copies_early(self) -> None:
        """Pending copies run before the next step; looking between steps must see them done."""
        self.cache._run_copies()
        self._apply_copies()

    def _state(self) -> tuple:
        return tuple(
            (
                p.n_used,
                p.n_cached,
                p.n_evicted,
                list(p._copies),
                [(seq, p.blocks(seq), r.length, r.reserved) for seq, r in p.sequences.items()],
            )
            for p in self.cache.placements
        )
