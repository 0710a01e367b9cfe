"""A step: the only data that goes from the bookkeeping to a device.

It holds only integers, so it can be pickled and sent to another process. The program that runs a step
applies it exactly once: first the moves of each group, in order, then the edits of its table. For a
step that is not applied, call `KVCache.drop`: it frees the sequences that need its moves and edits.
"""

from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the first `slots` slots of block src to block dst, in every layer of the group."""

    src: int
    dst: int
    slots: int


class RowEdit(NamedTuple):
    """From entry `start` on, the table's row holds these blocks. Slot 0 of block i has position firsts[i]."""

    row: int
    start: int
    blocks: list[int]
    firsts: list[int]


class GroupStep(NamedTuple):
    """The changes for one group of layers. `n_blocks` and `kv_len` have one entry per row of the step, `cells` one
    per token."""

    moves: list[Copy]
    edits: list[RowEdit]
    n_blocks: list[int]
    kv_len: list[int]  # tokens of each sequence after the step
    cells: list[int]  # where each new token is written: block * block_size + slot


class Step(NamedTuple):
    """New tokens of some sequences. Rows of q, k and v are in the order of `seqs`, then of position."""

    seqs: tuple[int, ...]
    rows: list[int]  # the table row of each sequence, ascending
    n_new: list[int]  # number of new tokens of each sequence
    positions: list[int]  # position of each new token
    groups: tuple[GroupStep, ...]
