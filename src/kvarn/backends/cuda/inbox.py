"""The integers of a step on the device: one copy from page-locked memory per step.

    tokens | positions | rows | wanted | singles | runs | counts     one room each
    cells | shifts                                                   one room each for every group
    places | kept                                                    one room each, if the codec has a tail
    edits of the tables | moves                                      as many as there are

Two buffers on the host are used in turn: while one is copied, the other is filled. A step of single tokens
has its arrays padded to a bucket of rows, so that a graph of launches can read them (graphs.py). Their room
is the bucket, and in other steps that of the largest step so far. So the addresses of a bucket's arrays
change only when a larger step comes.

The table of a sequence has its pinned blocks, and then others that are consecutive. So one number, the shift, says
which logical block an entry is: entry + shift. It comes with every token, so that a kernel need not look for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.specs import SPLIT
from kvarn.cache.codec import TILE
from kvarn.cache.plan import TAIL_TILES, Group, Plan
from kvarn.cache.spec import LayerSpec, align, ceil_div
from kvarn.cache.step import Copy, RowEdit, Step

ALIGNMENT = 4  # numbers: kernels are compiled for addresses that are multiples of 16 bytes
SECTIONS = 7  # of `capacity` numbers, before the cells
BUCKETS = tuple(1 << i for i in range(9))  # rows
NOWHERE = -1  # the position of a row that pads a bucket, which sees no key, and its cell, which is not written


class Numbers(NamedTuple):
    address: int
    length: int


@dataclass(slots=True)
class GroupFrame:
    cells: int  # address: the cell of each token
    shifts: int  # address: the shift of the table of each token
    edits: Numbers  # pairs (index, value) for the table
    moves: list[Numbers]  # triples (source, destination, slots): one launch each, in order
    n_splits: int  # most splits that one of the single tokens sees
    bucket: int  # at least as many


@dataclass(slots=True)
class Frame:
    """A step on the device: counts, and addresses of arrays of i32."""

    step: Step
    n_tokens: int
    n_wanted: int
    n_singles: int  # sequences with one new token
    n_runs: int  # sequences with more
    longest_run: int  # tokens of the largest
    bucket: int  # rows with the padding, if every sequence has one new token and all are wanted; otherwise 0
    tokens: int = 0
    sampled: int = 0  # tokens of the last step's draws
    positions: int = 0
    rows: int = 0  # the row of the table of each token
    wanted: int = 0
    singles: int = 0  # the tokens of `n_singles`: all of them, in order, if there are no runs
    runs: int = 0  # the first token of each run
    counts: int = 0  # the tokens of each run
    places: int = 0  # of the int8 row of each token: in the tail, or from `near` on beside it
    kept: int = 0  # the place in the tail of each token of a run, afterwards; -1: nowhere
    fills: bool = False  # a tile may be filled
    groups: list[GroupFrame] = field(default_factory=list)

    def padded(self) -> "Frame":
        """With all rows of the bucket. Every step of the same buckets is the same but for the content of arrays."""
        groups = [replace(group, n_splits=group.bucket) for group in self.groups]
        return replace(self, n_tokens=self.bucket, n_wanted=self.bucket, n_singles=self.bucket, groups=groups)


class Inbox:
    def __init__(self, driver: Device, plan: Plan) -> None:
        self._driver = driver
        self._plan = plan
        self._capacity = 0  # tokens
        self._room = 0  # numbers
        self.memory: Allocation | None = None
        self._host: list[NDArray[np.uint8]] = []
        self._sent = [driver.event(), driver.event()]
        self._turn = 0
        self._tailed = plan.codec.tail > 0
        self.near = plan.tail_blocks * TILE
        self._shifts = [np.zeros(plan.max_seqs, np.int64) for _ in plan.groups]  # of the rows of each table

    def send(self, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> Frame:
        """Copy the step to the device. Kernels run its moves and edit the tables."""
        new = np.array(step.n_new, np.int64)
        starts = np.cumsum(new) - new
        single, several = starts[new == 1], starts[new > 1]
        positions = np.array(step.positions, np.int64)
        edits = [_edits(group, changes.edits) for group, changes in zip(self._plan.groups, step.groups, strict=True)]
        waves = [_waves(changes.moves) for changes in step.groups]
        lists = [*edits, *(wave for each in waves for wave in each)]
        variable = sum(align(len(each), ALIGNMENT) for each in lists)
        n = len(positions)
        bucket = in_bucket(n) if 0 < n == len(single) == len(wanted) <= BUCKETS[-1] else 0
        writer = self._begin(max(n, bucket), variable)

        put, capacity = writer.put, bucket or self._capacity
        frame = Frame(step, n, len(wanted), len(single), len(several), int(new.max(initial=0)), bucket)
        spare = np.arange(n, bucket)
        first, nowhere = np.zeros_like(spare), np.full_like(spare, NOWHERE)
        frame.tokens = put(tokens, capacity, first)
        frame.positions = put(positions, capacity, nowhere)
        table_rows = np.repeat(np.array(step.rows, np.int64), new)
        frame.rows = put(table_rows, capacity, first)
        frame.wanted = put(wanted, capacity, spare)
        frame.singles = put(single, capacity, spare)
        frame.runs = put(several, capacity)
        frame.counts = put(new[new > 1], capacity)
        cells = [put(changes.cells, capacity, nowhere) for changes in step.groups]
        self._note_shifts(step)
        shifts = [put(known[table_rows], capacity, first) for known in self._shifts]
        if self._tailed:
            places, kept = _places(positions, table_rows, new, self.near)
            frame.places, frame.kept = put(places, capacity, nowhere), put(kept, capacity, nowhere)
            frame.fills = bool(bucket) or bool((positions % TILE == TILE - 1).any())
        found = zip(self._plan.groups, cells, shifts, edits, waves, strict=True)
        for group, cells_at, shifts_at, entries, moves in found:
            changed = Numbers(put(entries), len(entries) // 2)
            moved = [Numbers(put(wave), len(wave) // 3) for wave in moves]
            n_splits = most_splits(group.config.spec, positions[single]) + (self._tailed and len(single) > 0)
            bucket_of_splits = split_bucket(group, n_splits)
            frame.groups.append(GroupFrame(cells_at, shifts_at, changed, moved, n_splits, bucket_of_splits))
        self._driver.send(writer.base, writer.used)
        self._driver.record(self._sent[self._turn])
        self._turn = 1 - self._turn
        return frame

    def _note_shifts(self, step: Step) -> None:
        for known, group, changes in zip(self._shifts, self._plan.groups, step.groups, strict=True):
            for row, start, blocks, firsts in changes.edits:
                known[row] = firsts[-1] // group.config.block_size - (start + len(blocks) - 1)

    def _begin(self, n_tokens: int, variable: int) -> "_Writer":
        fixed = SECTIONS + 2 * len(self._plan.groups) + (2 if self._tailed else 0)
        if n_tokens > self._capacity or fixed * self._capacity + variable > self._room:
            self._driver.synchronize()
            capacity = align(max(n_tokens, self._capacity), ALIGNMENT)
            room = 2 * (fixed * capacity + variable) + 1024
            memory = Allocation(self._driver, 4 * room)
            host = [self._driver.pinned(4 * room) for _ in self._sent]
            if self.memory is not None:
                self.memory.release()
            self._capacity, self._room, self.memory, self._host = capacity, room, memory, host
        else:
            self._driver.wait(self._sent[self._turn])
        assert self.memory is not None
        return _Writer(self.memory.address, self._host[self._turn].view(np.int32))


class _Writer:
    def __init__(self, base: int, host: NDArray[np.int32]) -> None:
        self.base, self._host, self._at = base, host, 0

    def put(self, numbers: Any, room: int | None = None, more: Sequence[int] | NDArray[np.int64] = ()) -> int:
        """The device's address of these numbers, which `more` follow."""
        at, end = self._at, self._at + len(numbers)
        self._host[at:end] = numbers
        self._host[end : end + len(more)] = more
        self._at += align(len(numbers) if room is None else room, ALIGNMENT)
        return self.base + 4 * at

    @property
    def used(self) -> NDArray[np.uint8]:
        return self._host[: self._at].view(np.uint8)


def most_splits(spec: LayerSpec, positions: NDArray[np.int64]) -> int:
    """Of queries at these positions. kernels/attention.py: first_split."""
    if not len(positions):
        return 0
    lowest = 0 if spec.window is None else np.maximum(positions - spec.window + 1, 0)
    pins = np.where(lowest == 0, 0, -(-spec.pinned // SPLIT))
    first = np.maximum(lowest // SPLIT, pins)
    return int((pins + positions // SPLIT - first + 1).max())


def _places(
    positions: NDArray[np.int64], rows: NDArray[np.int64], new: NDArray[np.int64], near: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the int8 row of each token is written, and where in the tail it is kept after the step. The tail has the
    last two tiles of a sequence."""
    in_tail = (TAIL_TILES * rows + positions // TILE % TAIL_TILES) * TILE + positions % TILE
    ends = np.repeat(positions[np.cumsum(new) - 1], new)
    single, last = np.repeat(new == 1, new), positions // TILE > ends // TILE - TAIL_TILES
    places = np.where(single, in_tail, near + np.arange(len(positions)))
    return places, np.where(last & ~single, in_tail, NOWHERE)


def in_bucket(n_rows: int) -> int:
    """Rows with the padding. There are no buckets for steps larger than the largest one."""
    return next((bucket for bucket in BUCKETS if n_rows <= bucket), n_rows)


def all_splits(group: Group) -> int:
    """Most splits that a token at the end of the context sees. A tail is one of them."""
    return ceil_div(group.config.context, SPLIT) + 1 + (group.tail is not None)


def split_bucket(group: Group, n_splits: int) -> int:
    """A power of two, or all splits if that is less."""
    return max(n_splits, min(1 << max(n_splits - 1, 0).bit_length(), all_splits(group)))


def _edits(group: Group, edits: Sequence[RowEdit]) -> list[int]:
    """Pairs (index, value) for a table of [max_seqs, blocks of a sequence]."""
    pairs: list[int] = []
    for row, start, blocks, _ in edits:
        for entry, block in enumerate(blocks, row * group.blocks_per_sequence + start):
            pairs += entry, block
    return pairs


def _waves(moves: Sequence[Copy]) -> list[list[int]]:
    """Moves in order, in as few launches as possible: a launch writes no block that another of its moves touches."""
    waves: list[list[int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        if not waves or move.src in written or move.dst in written or move.dst in read:
            waves.append([])
            read, written = set(), set()
        waves[-1] += move
        read.add(move.src)
        written.add(move.dst)
    return waves
