"""The placement axis: which physical block holds logical block j of a sequence.

Contract of every placement. A verb succeeds completely, or it raises and changes nothing. `reserve`
and `fork` return False and change nothing when there is no room now. Only `commit` and `rewind` take
blocks from a live sequence. The module imports no tensor library, so tests need no device.

    open -> adopt? -> (reserve -> copies -> [kernels write and read] -> advance -> commit)* -> free
                       rewind and fork between steps

`advance` reports that a launched step writes these positions. `commit` gives their token ids. The
next step may be reserved before the commit, while at most `GroupConfig.ahead` tokens are uncommitted.

How to write a member (placements/, one file each). `Placement` checks the arguments and keeps the
counts `committed`, `length` and `reserved` of a Residency `r`. It calls these methods of the member:

    verb      methods of the member, in order of the calls
    open      _new(salt, priority): return an empty Residency
    adopt     match(seq, tokens, limit): decide, change nothing   (only if `shares`)
              _take(r, tokens, reused): add the reused blocks to r (only if reused > 0)
    reserve   _shortfall(r, length): return the number of missing blocks; raise if it can never fit
              _extend(r, length): add the blocks                  (only if nothing is missing)
    commit    _committed(r, tokens): register the tokens, remove the blocks of `_dead_blocks(r)`
    rewind    _intact_from(r, end): say which blocks still have their content
              _rewound(r, length): remove the blocks past length
    fork      can_fork(parent): decide, change nothing
              _forked(source, length): return the child's Residency, with the first `length` tokens
    free      _released(r): give the blocks back
    discard   discard(blocks): forget the content of these blocks (only if `shares`)
    check     _check_pool(): raise BrokenInvariant if the counts of blocks do not add up

Three rules for a member:

- `r.writable`: positions below this number are reserved without a call of the member (`_ready`).
  `_extend` increases it, `rewind` sets it to 0. A member sets it to 0 when another sequence begins to
  share a block that r may write.
- `r.changed`: the first entry that the device's table does not have yet. Change entries only with
  `Residency.append`, `replace` and `remove`, which update `changed`. KVCache.prepare sends the entries.
- `self._copies`: a member appends each copy between blocks. The copies run before the next writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.holes import sees
from kvarn.cache.journal import NOWHERE, Journal, TreeJournal
from kvarn.cache.residency import NO_HOLE, Residency
from kvarn.cache.spec import ceil_div
from kvarn.cache.step import Copy
from kvarn.cache.tier import Spill
from kvarn.errors import BadStep, BrokenInvariant, PastCapacity, SequenceExists, UnknownSequence

R = TypeVar("R", bound=Residency)


class Placement(ABC, Generic[R]):
    shares = False  # whether `adopt` can ever reuse anything
    on_demand = False  # whether a sequence takes single blocks as it grows, not all at its first reserve

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.block_size = config.block_size
        self.max_chunk = config.max_chunk
        self.ahead = config.ahead
        self.sequences: dict[int, R] = {}
        self._copies: list[Copy] = []

    @staticmethod
    @abstractmethod
    def blocks_per_sequence(config: GroupConfig) -> int:
        """Most blocks that one sequence can hold. Does not use config.n_blocks."""

    @property
    @abstractmethod
    def n_used(self) -> int:
        """Blocks held by live sequences, each counted once."""

    @property
    def n_cached(self) -> int:
        """Blocks that no sequence holds and whose content can be reused."""
        return 0

    @property
    def n_evicted(self) -> int:
        """Cached blocks evicted so far."""
        return 0

    @property
    def cached_blocks(self) -> list[tuple[int, int]]:
        """(block, tokens in it) of each cached block, in order of eviction."""
        return []

    @property
    def n_resident(self) -> int:
        """Tokens whose keys and values are in the cache. A shared token counts once."""
        filled: dict[int, int] = dict(self.cached_blocks)
        for r in self.sequences.values():
            for block, first in zip(r.blocks, r.firsts, strict=True):
                filled[block] = max(filled.get(block, 0), min(r.length - first, self.block_size))
        return sum(filled.values())

    # -- verbs ---------------------------------------------------------------------------------------------------

    def open(self, seq: int, salt: bytes = b"", priority: int = 0) -> R:
        """Only sequences with the same salt share. Eviction skips the blocks that this one leaves `priority` times."""
        if seq in self.sequences:
            raise SequenceExists(f"sequence {seq} is already open: free it first, or use another id")
        self.sequences[seq] = r = self._new(salt, priority)
        return r

    def match(self, seq: int, tokens: Sequence[int], limit: int) -> Adoption:
        """What `adopt` would return with this limit. Changes nothing."""
        return Adoption(0, ReuseLimit(Reason.NOT_SHARING, 0))

    def adopt(self, seq: int, tokens: Sequence[int], limit: int | None = None) -> Adoption:
        """Reuse the cached prefix of `tokens`, at most `limit` tokens and never the last token."""
        r = self.residency(seq)
        if r.length or r.reserved:
            raise BadStep(f"sequence {seq} has {r.length} tokens already: adopt comes before the first reserve")
        limit = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        adoption = self.match(seq, tokens, max(limit, 0))
        if adoption.reused:
            self._take(r, tokens, adoption.reused)
            r.committed = r.length = r.reserved = adoption.reused
        return adoption

    def shortfall(self, seq: int, length: int) -> int:
        """Blocks that are missing to reserve `length` tokens; 0 if they fit now. Raises if they can never fit."""
        r = self.residency(seq)
        if self._ready(r, length):
            return 0
        self._check_length(seq, r, length)
        return self._shortfall(r, length)

    def reserve(self, seq: int, length: int) -> bool:
        """Make room for positions below `length`. False if there is no room now."""
        r = self.residency(seq)
        if not self._ready(r, length):
            self._check_length(seq, r, length)
            if self._shortfall(r, length):
                return False
            self._extend(r, length)
        r.reserved = length
        return True

    def reserve_next(self, residencies: Sequence[R]) -> list[int]:
        """Reserve the next position of those that need no more for it. The others are returned."""
        late = []
        for at, r in enumerate(residencies):
            if r.length < r.writable and r.length - r.committed <= self.ahead:
                r.reserved = r.length + 1
            else:
                late.append(at)
        return late

    def advance(self, seq: int, n: int) -> None:
        """A launched step writes n more positions. Any further reserved positions are cancelled."""
        r = self.residency(seq)
        if not 0 < n <= r.reserved - r.length:
            raise BadStep(
                f"sequence {seq}: advance by {n} tokens after {r.length}, {r.reserved} reserved: "
                "advance by at least one token and no more than were reserved"
            )
        r.length = r.reserved = r.length + n

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Give the ids of the oldest uncommitted tokens, in order."""
        r = self.residency(seq)
        if not 0 < len(tokens) <= r.length - r.committed:
            raise BadStep(
                f"sequence {seq}: commit of {len(tokens)} tokens where {r.length - r.committed} wait for it: "
                "commit at least one token and no more than were advanced over"
            )
        r.committed += len(tokens)
        self._committed(r, tokens)

    def commit_next(self, seqs: Sequence[int], residencies: Sequence[R], tokens: Sequence[int]) -> None:
        """Commit one token of each sequence. All of them are checked first."""
        for seq, r in zip(seqs, residencies, strict=True):
            if r.length == r.committed:
                raise BadStep(f"sequence {seq} has no token that waits for its commit")
        for r, token in zip(residencies, tokens, strict=True):
            r.committed += 1
            self._committed(r, (token,))

    def intact(self, seq: int, length: int) -> int:
        """The longest length <= `length` to which the sequence can rewind. Changes nothing."""
        r = self.residency(seq)
        if not 0 <= length <= r.committed:
            raise BadStep(f"sequence {seq} has {r.committed} tokens and cannot rewind to {length}")
        if sees(self.spec, r.hole, length):
            length = r.hole.start
        pinned, end = self.config.pinned_blocks, ceil_div(length, self.block_size)
        needed = max(self.spec.floor(length) // self.block_size, pinned)
        if needed >= end or needed >= self._intact_from(r, end):
            return length
        return min(length, pinned * self.block_size)

    def rewind(self, seq: int, length: int) -> int:
        """Return to the longest intact length <= `length`. The result is that length."""
        length = self.intact(seq, length)
        r = self.sequences[seq]
        self._rewound(r, length)
        r.hole = r.hole if length > r.hole.start else NO_HOLE
        r.committed = r.length = r.reserved = length
        r.writable = 0
        return length

    def can_fork(self, parent: int) -> bool:
        self.residency(parent)
        return True

    def fork(self, parent: int, child: int, length: int | None = None) -> bool:
        """Open `child` as a copy of the parent's committed tokens, or of the first `length` of them, which must be
        intact. Later writes of one do not change the other."""
        source = self.residency(parent)
        if source.reserved > source.committed:
            raise BadStep(f"sequence {parent} is in the middle of a step: commit it before a fork")
        if child in self.sequences:
            raise SequenceExists(f"sequence {child} is already open: free it first, or use another id")
        if not self.can_fork(parent):
            return False
        self.sequences[child] = r = self._forked(source, source.committed if length is None else length)
        r.hole = source.hole if r.length > source.hole.start else NO_HOLE
        return True

    @abstractmethod
    def lacks(self, length: int) -> int:
        """How many blocks a new sequence of this length would lack now."""

    @property
    def pending_copies(self) -> tuple[Copy, ...]:
        """The copies that the next step runs before its writes."""
        return tuple(self._copies)

    def copies(self) -> list[Copy]:
        """Return the pending copies and clear the list. The caller runs them before the step's writes."""
        pending, self._copies = self._copies, []
        return pending

    def blocks(self, seq: int) -> list[tuple[int, int]]:
        """[(physical block, position of its slot 0)], ascending."""
        r = self.residency(seq)
        return list(zip(r.blocks, r.firsts, strict=True))

    def free(self, seq: int) -> int:
        """Release the sequence and return its number of blocks; 0 if it is not open."""
        r = self.sequences.pop(seq, None)
        if r is None:
            return 0
        held = len(r.blocks)
        self._released(r)
        return held

    def discard(self, blocks: Iterable[int]) -> None:
        """Copies into these blocks were not run, so their content is wrong: do not reuse it."""

    def spill_to(self, group: int, spill: Spill) -> None:
        """Call `spill` with every full block before it is evicted (only if `shares`)."""

    def journal(self) -> Journal | TreeJournal:
        """What changes from now on. Its first look reports every block."""
        return Journal(self.sequences, self.block_size, self.config.n_blocks)

    def leaf(self, tokens: Sequence[int], salt: bytes) -> int:
        """The number of the last full block of this text that is known, or NOWHERE."""
        return NOWHERE

    def content(self, block: int, salt: bytes) -> tuple[int, ...]:
        """The tokens in the block, if it is known which they are and if they were written with this salt."""
        return ()

    def check(self) -> None:
        """Raise BrokenInvariant on state that only a bug can produce."""
        for seq, r in self.sequences.items():
            self._check_sequence(seq, r)
        self._check_pool()

    # -- for KVCache and the members -----------------------------------------------------------------------------

    def residency(self, seq: int) -> R:
        try:
            return self.sequences[seq]
        except KeyError:
            raise UnknownSequence(f"sequence {seq} is not open (never opened, or freed)") from None

    def _ready(self, r: R, length: int) -> bool:
        """Whether `length` can be reserved without calling the member: the common case of a decode step."""
        return (
            r.length < length <= r.writable
            and length - r.length <= self.max_chunk
            and r.length - r.committed <= self.ahead
        )

    def _check_length(self, seq: int, r: R, length: int) -> None:
        if length <= r.length:
            raise BadStep(f"sequence {seq} has {r.length} tokens: reserve more than that, not {length}")
        if r.length - r.committed > self.config.ahead:
            raise BadStep(
                f"sequence {seq} has {r.length - r.committed} tokens that are not committed, and may have "
                f"{self.config.ahead}: commit them before the next reserve"
            )
        if length > self.config.context:
            raise PastCapacity(
                f"sequence {seq} would reach {length} tokens and the context holds {self.config.context}: "
                "shorten it or raise the context"
            )
        if length - r.length > self.max_chunk:
            raise PastCapacity(
                f"sequence {seq}: a step of {length - r.length} tokens is more than the largest chunk, "
                f"{self.max_chunk}: split it"
            )

    def _dead_blocks(self, r: R) -> range:
        """Range of entries of r.blocks that no later query can see. Pinned blocks come before it and stay."""
        start = stop = min(self.config.pinned_blocks, len(r.blocks))
        last, begun = self.block_size - 1, r.committed - r.committed % self.config.tile
        while stop < len(r.firsts) and self.spec.dead(r.firsts[stop], r.firsts[stop] + last, begun):
            stop += 1
        return range(start, stop)

    def _check_sequence(self, seq: int, r: R) -> None:
        def ensure(holds: bool, what: str) -> None:
            if not holds:
                raise BrokenInvariant(f"{type(self).__name__}: sequence {seq}: {what}")

        ensure(len(r.blocks) == len(r.firsts), "blocks and positions differ in number")
        ensure(len(set(r.blocks)) == len(r.blocks), "a block is listed twice")
        ensure(all(0 <= b < self.config.n_blocks for b in r.blocks), "a block is outside the store")
        ensure(all(f % self.block_size == 0 for f in r.firsts), "a block starts off the grid")
        ensure(all(a < b for a, b in zip(r.firsts, r.firsts[1:], strict=False)), "positions do not ascend")
        ensure(
            0 <= r.committed <= r.length <= r.reserved <= self.config.context,
            "committed, length, reserved and context are out of order",
        )
        listed = set(r.firsts)
        for logical in range(ceil_div(max(r.length, r.reserved), self.block_size)):
            first = logical * self.block_size
            needed = not self.spec.dead(first, first + self.block_size - 1, r.committed)
            ensure(not needed or first in listed, f"the visible block at position {first} is not resident")
        ensure(len(r.blocks) <= self.blocks_per_sequence(self.config), "holds more blocks than its bound")

    # -- a member implements these (see the module's docstring) --------------------------------------------------

    @abstractmethod
    def _new(self, salt: bytes, priority: int) -> R: ...

    def _take(self, r: R, tokens: Sequence[int], reused: int) -> None:
        raise NotImplementedError  # needed only if match() can return more than 0 tokens

    @abstractmethod
    def _shortfall(self, r: R, length: int) -> int: ...

    @abstractmethod
    def _extend(self, r: R, length: int) -> None: ...

    @abstractmethod
    def _committed(self, r: R, tokens: Sequence[int]) -> None: ...

    @abstractmethod
    def _intact_from(self, r: R, end: int) -> int:
        """The lowest logical block b after the pinned ones such that blocks b to end - 1 have their content."""

    @abstractmethod
    def _rewound(self, r: R, length: int) -> None: ...

    @abstractmethod
    def _forked(self, source: R, length: int) -> R: ...

    @abstractmethod
    def _released(self, r: R) -> None: ...

    @abstractmethod
    def _check_pool(self) -> None: ...
