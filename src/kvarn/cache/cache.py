"""KVCache: the bookkeeping of a cache, with one placement per group of layers. Integers only.

A verb changes all groups or none. The engine's step:

    reserve each sequence -> prepare -> [a program applies and runs the Step] -> advance -> commit

Call `advance` (or `launched`, for all sequences of a step) after the launch. Call `commit` when the
token ids are known. If a device runs steps asynchronously, the next step may be prepared before the
commit (`CacheConfig.ahead`). `advance` cancels the reserved positions that it does not cover.

Every verb is atomic and may be called from any thread. Steps must be applied in the order in which
they were prepared. Non-goal: the cells and their addresses, which a backend owns (backends/base.py:
Memory).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

from kvarn.cache.adoption import NOT_FETCHED, Adoption, Fetched
from kvarn.cache.entry import Entry, check_whole, ids_of
from kvarn.cache.holes import overlapping
from kvarn.cache.placement import Placement
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.plan import Plan
from kvarn.cache.prefix import common
from kvarn.cache.preparing import check_prepared, group_step
from kvarn.cache.sharing import NO_SHARING, match, parting
from kvarn.cache.step import Step
from kvarn.cache.tier import Spill
from kvarn.cache.usage import GroupMap, PrefixCount, Query, Usage
from kvarn.cache.watching import Watching
from kvarn.errors import BadStep, BrokenInvariant, KvarnError, OutOfSequences, SequenceExists, UnknownSequence


class KVCache:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lock = RLock()
        self._prefixes = PrefixCount()
        self._spill: Spill | None = None
        self._tile = plan.tile
        self.longest = min(group.longest for group in plan.groups)  # tokens of a sequence that is alone in the cache
        self.watching = Watching(self.lock, self._prefixes)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence and every prefix. No step may be under way."""
        with self.lock:
            make = PLACEMENTS[self.plan.strategy.placement]
            self.placements: list[Placement[Any]] = [make(group.config) for group in self.plan.groups]
            self._entries: dict[int, Entry] = {}
            self._free_rows = list(reversed(range(self.plan.max_seqs)))
            if self._spill is not None:
                self.spill_to(self._spill)
            self.watching.reset(self.placements)

    def spill_to(self, spill: Spill) -> None:
        """Call `spill` with every full block just before it is evicted, inside of the verb that evicts it."""
        self._spill = spill
        for group, placement in enumerate(self.placements):
            placement.spill_to(group, spill)

    # -- sequences -----------------------------------------------------------------------------------------------

    def open(self, seq: int, salt: bytes = b"", priority: int = 0) -> None:
        """Only sequences with the same salt share prefixes. Eviction skips the blocks that this sequence leaves in
        the cache `priority` times."""
        with self.lock:
            self._check_openable(seq)
            if not isinstance(salt, bytes):
                raise KvarnError(f"the salt is {salt!r}; it must be bytes")
            residencies = tuple(p.open(seq, salt, priority) for p in self.placements)
            self._entries[seq] = Entry(self._free_rows.pop(), residencies)

    @property
    def shares(self) -> bool:
        """Whether a prompt can reuse what another sequence computed."""
        return all(p.shares for p in self.placements)

    def adopt(self, seq: int, tokens: Sequence[int], counted: bool = True, fetched: Fetched = NOT_FETCHED) -> Adoption:
        """Reuse the prefix of this prompt that every group still has, but never its last token.

        `counted=False` after a preemption: the request's first lookup was already counted. `fetched`: what tiers
        gave just before."""
        with self.lock:
            entry, ids = self._entry(seq), ids_of(tokens)
            adoption = match(self.placements, seq, ids, self._tile) if self.shares else NO_SHARING
            for placement in self.placements:
                placement.adopt(seq, ids, adoption.reused)
            entry.tail_from = adoption.reused
            if fetched.limit is not None and adoption.reused < fetched.limit.at:
                adoption = Adoption(adoption.reused, fetched.limit)
            self._count(entry, Query(len(ids), adoption, fetched), counted)
            return adoption

    def resume(self, seq: int, had: Sequence[int], tokens: Sequence[int], counted: bool = True) -> Adoption:
        """Continue an open sequence that holds the tokens `had` with the prompt `tokens`.

        It rewinds to the common prefix, as far as that is intact, and never reuses the last token of
        `tokens`. Works with every strategy."""
        with self.lock:
            entry, ids = self._entry(seq), ids_of(tokens)
            shared = common(had, ids[:-1])
            reused = self.rewind(seq, shared)
            adoption = Adoption(reused, parting(had, ids, shared, reused, self._tile))
            self._count(entry, Query(len(ids), adoption), counted)
            return adoption

    def _count(self, entry: Entry, query: Query, counted: bool) -> None:
        if entry.query is not None:
            self._prefixes.take_back(entry.query)
        entry.query = query if counted else None
        if counted:
            self._prefixes.add(query)

    def reserve(self, seq: int, length: int) -> bool:
        """Make room for `length` tokens in every group. False, with no change, if there is no room now. Raises if
        they can never fit."""
        check_whole(length)
        with self.lock:
            if len(self.placements) > 1 and any(p.shortfall(seq, length) for p in self.placements):
                return False
            return all(p.reserve(seq, length) for p in self.placements)

    def reserve_next(self, seqs: Sequence[int]) -> bool:
        """Reserve one token more than each sequence has. False if there is no room for all of them; then some may be
        reserved."""
        with self.lock:
            entries = [self._entry(seq) for seq in seqs]
            if len(self.placements) == 1:
                placement = self.placements[0]
                late = placement.reserve_next([entry.residencies[0] for entry in entries])
                return all(placement.reserve(seqs[at], entries[at].residencies[0].length + 1) for at in late)
            ends = [entry.residencies[0].length + 1 for entry in entries]
            return all(map(self.reserve, seqs, ends))

    def advance(self, seq: int, n: int) -> None:
        """The prepared step was launched and writes n more positions of the sequence."""
        with self.lock:
            entry = self._entry(seq)
            if entry.residencies[0].length + n > entry.prepared:
                raise BadStep(f"sequence {seq}: no prepared step writes these {n} tokens: prepare, then advance")
            for placement in self.placements:
                placement.advance(seq, n)
            entry.prepared = 0
            entry.query = None

    def launched(self, step: Step) -> None:
        """Advance every sequence of the step over all its new tokens."""
        with self.lock:
            entries = [self._entry(seq) for seq in step.seqs]
            for seq, entry, n in zip(step.seqs, entries, step.n_new, strict=True):
                if entry.residencies[0].length + n != entry.prepared:
                    raise BadStep(f"sequence {seq} has changed since this step was prepared: prepare a new step")
            for entry in entries:
                for r in entry.residencies:
                    r.length = r.reserved = entry.prepared
                entry.prepared = 0
                entry.query = None

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Give the ids of the oldest uncommitted tokens, in order. Other sequences can share them from now on."""
        with self.lock:
            ids = ids_of(tokens)
            for placement in self.placements:
                placement.commit(seq, ids)

    def commit_next(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit one token of each sequence."""
        with self.lock:
            ids, entries = ids_of(tokens), [self._entry(seq) for seq in seqs]
            if not len(ids) == len(seqs) == len(set(seqs)):
                raise BadStep(f"{len(ids)} tokens for {len(seqs)} sequences: give one for each, and name each once")
            for index, placement in enumerate(self.placements):
                placement.commit_next(seqs, [entry.residencies[index] for entry in entries], ids)

    def restored(self, seq: int, tokens: Sequence[int], holes: Sequence[range]) -> None:
        """Advance and commit, for cells that were written from outside. holes[g] are positions of group g that have no
        cells, because no later query sees them: no other sequence reuses them, and no rewind shows them."""
        with self.lock:
            pairs = list(zip(self.placements, holes, strict=True))
            hollow = [overlapping(placement.blocks(seq), placement.block_size, hole) for placement, hole in pairs]
            self.advance(seq, len(tokens))
            entry = self._entry(seq)
            length = entry.residencies[0].length
            entry.tail_from = length - length % self._tile  # the end of the text is the begin of a tile
            with self._unspilled():
                self.commit(seq, tokens)
                for (placement, hole), blocks in zip(pairs, hollow, strict=True):
                    placement.discard(blocks)
                    placement.residency(seq).hole = hole

    @contextmanager
    def _unspilled(self) -> Iterator[None]:
        """Nothing that is evicted meanwhile goes to a tier: some blocks of the tree have no cells."""
        spill = self._spill
        if spill is not None:
            self.spill_to(lambda spilled: None)
        try:
            yield
        finally:
            if spill is not None:
                self.spill_to(spill)

    def abandon(self, seq: int) -> None:
        """Free a sequence that was not restored completely. Nothing of it can be reused. No error if it is not open."""
        with self.lock:
            if seq in self._entries:
                held = [[block for block, _ in placement.blocks(seq)] for placement in self.placements]
                self.rewind(seq, 0)  # before `free`, which would keep an unfilled block
                self.free(seq)
                for placement, blocks in zip(self.placements, held, strict=True):
                    placement.discard(blocks)

    def rewind(self, seq: int, length: int) -> int:
        """Return to the longest length <= `length` that is intact in every group. The result is that length."""
        check_whole(length)
        with self.lock:
            entry = self._entry(seq)
            wanted = self._intact(seq, length, entry.tail_from)
            for placement in self.placements:
                placement.rewind(seq, wanted)
            entry.prepared = 0
            entry.tail_from = min(entry.tail_from, wanted)
            return wanted

    def _intact(self, seq: int, length: int, tail_from: int) -> int:
        """The longest length <= `length` to which the sequence can return if the tail has the tiles from `tail_from`
        on. Without them, it can return only to the begin of a tile."""
        while True:
            intact = min(p.intact(seq, length) for p in self.placements)
            begun = intact - intact % self._tile
            intact = intact if begun >= tail_from else begun
            if intact == length:
                return length
            length = intact

    def fork(self, parent: int, child: int) -> bool:
        """Open `child` as a copy of the parent's committed tokens, or of whole tiles of them: nobody gets the tail of
        another sequence. False, with no change, if there is no room."""
        with self.lock:
            committed = self._entry(parent).residencies[0].committed
            self._check_openable(child)
            if not all(p.can_fork(parent) for p in self.placements):
                return False
            length = committed if self._tile == 1 else self._intact(parent, committed, committed + 1)
            for placement in self.placements:
                placement.fork(parent, child, length)
            residencies = tuple(p.residency(child) for p in self.placements)
            self._entries[child] = entry = Entry(self._free_rows.pop(), residencies)
            entry.tail_from = length
            return True

    def free(self, seq: int) -> int:
        """Release the sequence and return its number of blocks; 0 if it is not open."""
        with self.lock:
            entry = self._entries.pop(seq, None)
            if entry is None:
                return 0
            if entry.query is not None:  # freed before a token was computed: the lookup does not count
                self._prefixes.take_back(entry.query)
            self._free_rows.append(entry.row)
            return sum(p.free(seq) for p in self.placements)

    def drop(self, step: Step) -> list[int]:
        """The step will not be applied, so its moves and edits are lost. Free every sequence that needs them, and
        return the freed sequences."""
        with self.lock:
            lost = {seq for seq in step.seqs if seq in self._entries}
            for placement, group in zip(self.placements, step.groups, strict=True):
                targets = {move.dst for move in group.moves}
                lost |= {seq for seq, r in placement.sequences.items() if targets.intersection(r.blocks)}
            for seq in lost:
                self.free(seq)
            for placement, group in zip(self.placements, step.groups, strict=True):
                placement.discard(move.dst for move in group.moves)
            return sorted(lost)

    def length(self, seq: int) -> int:
        """Tokens committed."""
        return self._entry(seq).residencies[0].committed

    def lacks(self, length: int) -> int:
        """How many blocks a new sequence of this length would lack now."""
        with self.lock:
            return sum(placement.lacks(length) for placement in self.placements)

    @property
    def n_rows_free(self) -> int:
        """Sequences that can be opened now."""
        return len(self._free_rows)

    # -- a step --------------------------------------------------------------------------------------------------

    def prepare(self, seqs: Sequence[int]) -> Step:
        """The step over these reserved sequences. The caller must apply it exactly once, or `drop` it."""
        with self.lock:
            members = []
            for seq in seqs:
                entry = self._entry(seq)
                check_prepared(seq, entry, self._tile)
                members.append((entry.row, seq, entry))
            if not members:
                raise BadStep("a step needs at least one sequence")
            members.sort()
            rows = [row for row, _, _ in members]
            if len(set(rows)) != len(rows):
                raise BadStep("a sequence is twice in the step: name each sequence once")
            n_new: list[int] = []
            positions: list[int] = []
            for _, _, entry in members:
                r = entry.residencies[0]
                n_new.append(r.reserved - r.length)
                positions += range(r.length, r.reserved)
                entry.prepared = r.reserved
                if self._tile > 1:  # the step will overwrite the tiles before the last two
                    last_two = (r.reserved - 1) // self._tile * self._tile - self._tile
                    entry.tail_from = max(min(entry.tail_from, r.length), last_two)
            groups = [
                group_step(placement, rows, [entry.residencies[index] for _, _, entry in members])
                for index, placement in enumerate(self.placements)
            ]
            return Step(tuple([seq for _, seq, _ in members]), rows, n_new, positions, tuple(groups))

    # -- inspection ----------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        with self.lock:
            return Usage(
                sequences=len(self._entries),
                tokens=sum(entry.residencies[0].committed for entry in self._entries.values()),
                tokens_resident=max(p.n_resident for p in self.placements),
                nbytes=self.plan.nbytes,
                blocks=self.plan.n_blocks,
                blocks_used=sum(p.n_used for p in self.placements),
                blocks_cached=sum(p.n_cached for p in self.placements),
                blocks_evicted=sum(p.n_evicted for p in self.placements),
                prefix_queries=self._prefixes.queries,
                prefix_hits=self._prefixes.hits,
                prefix_misses=dict(+self._prefixes.misses),
                external_queries=self._prefixes.external_queries,
                external_hits=self._prefixes.external_hits,
            )

    def map(self) -> list[GroupMap]:
        """What each block holds, per group."""
        with self.lock:
            pairs = zip(self.plan.groups, self.placements, strict=True)
            return [
                GroupMap(
                    group.layers,
                    group.config.block_size,
                    group.config.n_blocks,
                    placement.cached_blocks,
                    {seq: placement.blocks(seq) for seq in self._entries},
                )
                for group, placement in pairs
            ]

    def picture(self) -> tuple[Usage, list[GroupMap]]:
        """`usage` and `map` of the same moment."""
        with self.lock:
            return self.usage(), self.map()

    def check(self) -> None:
        """Raise BrokenInvariant on state that only a bug can produce."""
        with self.lock:
            for placement in self.placements:
                placement.check()
                if set(placement.sequences) != set(self._entries):
                    raise BrokenInvariant("a group has other sequences than the cache")
            rows = [entry.row for entry in self._entries.values()] + self._free_rows
            if sorted(rows) != list(range(self.plan.max_seqs)):
                raise BrokenInvariant("table rows in use and free rows are not all rows, each once")
            for seq, entry in self._entries.items():
                self._check_entry(seq, entry)

    def _check_entry(self, seq: int, entry: Entry) -> None:
        if len({(r.committed, r.length, r.reserved) for r in entry.residencies}) != 1:
            raise BrokenInvariant(f"sequence {seq} has different lengths in different groups")

    # -- inside --------------------------------------------------------------------------------------------------

    def _entry(self, seq: int) -> Entry:
        try:
            return self._entries[seq]
        except KeyError:
            raise UnknownSequence(f"sequence {seq} is not open (never opened, or freed)") from None

    def _check_openable(self, seq: int) -> None:
        if seq in self._entries:
            raise SequenceExists(f"sequence {seq} is already open: free it first, or use another id")
        if not self._free_rows:
            raise OutOfSequences(f"all {self.plan.max_seqs} sequences are in use: free one, or raise max_seqs")
