"""A step: all that crosses from bookkeeping to a device. Integers only; it can be pickled and sent to another process.

A step is applied exactly once, by the program that runs it: first the moves of each group, in order, then the edits of
its table. A step that is not applied loses them; `KVCache.drop` then frees the sequences that relied on them.
"""

from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the first `slots` slots of block src to block dst, in every layer of the group, in the order given."""

    src: int
    dst: int
    slots: int


class RowEdit(NamedTuple):
    """From entry `start` on, a table's row holds these blocks, whose slots 0 stand at the positions `firsts`."""

    row: int
    start: int
    blocks: list[int]
    firsts: list[int]


class GroupStep(NamedTuple):
    """What changes for the layers of one group. Lists follow the rows of the step, `cells` its tokens."""

    moves: list[Copy]
    edits: list[RowEdit]
    n_blocks: list[int]
    kv_len: list[int]  # tokens that have a place, this step's included
    cells: list[int]  # where each new token is written: block * block_size + slot


class Step(NamedTuple):
    """New tokens of some sequences. Rows of q, k and v follow `seqs`, each sequence's new tokens in order."""

    seqs: tuple[int, ...]
    rows: list[int]  # of the tables, ascending: one per sequence
    n_new: list[int]  # new tokens of each
    positions: list[int]  # of each new token
    groups: tuple[GroupStep, ...]
