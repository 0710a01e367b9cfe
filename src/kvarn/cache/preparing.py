"""What a step needs: a sequence that is ready for it, and of each group of layers edits of table rows, lengths, and
the cells of the new tokens."""

from typing import Any

from kvarn.cache.entry import Entry
from kvarn.cache.placement import Placement
from kvarn.cache.residency import Residency
from kvarn.cache.step import GroupStep, RowEdit
from kvarn.errors import BadStep


def check_prepared(seq: int, entry: Entry, tile: int) -> None:
    """Raise BadStep if no step can be prepared for this sequence."""
    r = entry.residencies[0]
    if r.reserved == r.length:
        raise BadStep(f"sequence {seq} has nothing reserved: reserve before prepare")
    if r.length % tile and r.length - r.length % tile < entry.tail_from:
        raise BadStep(
            f"sequence {seq}: a step that was not advanced over has overwritten the last tokens of the tail: "
            "rewind before the next step"
        )


def group_step(placement: Placement[Any], rows: list[int], residencies: list[Residency]) -> GroupStep:
    """The changes of these rows since the last step that had them."""
    size = placement.block_size
    step = GroupStep(placement.copies(), [], [], [], [])
    _, edits, n_blocks, kv_len, cells = step
    for row, r in zip(rows, residencies, strict=True):
        held = len(r.blocks)
        if r.changed < held:
            edits.append(RowEdit(row, r.changed, r.blocks[r.changed :], r.firsts[r.changed :]))
        r.changed = held
        n_blocks.append(held)
        kv_len.append(r.reserved)
        pos = r.length
        if r.reserved - pos == 1:
            entry = -1 if pos >= r.firsts[-1] else r.index(pos // size)
            cells.append(r.blocks[entry] * size + pos - r.firsts[entry])
        else:
            _cells_of_chunk(r, size, cells)
    return step


def _cells_of_chunk(r: Residency, size: int, cells: list[int]) -> None:
    pos = r.length
    while pos < r.reserved:
        entry = r.index(pos // size)
        stop = min(r.firsts[entry] + size, r.reserved)
        cell = r.blocks[entry] * size + pos - r.firsts[entry]
        cells.extend(range(cell, cell + stop - pos))
        pos = stop
