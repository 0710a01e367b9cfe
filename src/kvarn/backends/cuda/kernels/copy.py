"""Copies the first slots of a block to another block: one move, one array of a layer, one head per program."""

import triton
import triton.language as tl


@triton.jit
def copy(
    moves,
    arena,
    parts,
    row_block,
    row_head,
    row_slot,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,
):
    """moves: (source, destination, slots). parts: where each array starts in the arena, and how large a row of it is,
    in bytes."""
    move = moves + tl.program_id(0) * 3
    source, target, slots = tl.load(move).to(tl.int64), tl.load(move + 1).to(tl.int64), tl.load(move + 2)
    base = arena + tl.load(parts + 2 * tl.program_id(1))
    size = tl.load(parts + 2 * tl.program_id(1) + 1)
    d = tl.arange(0, ROW)[None, :]
    for start in range(0, slots, SLOTS):
        slot = (start + tl.arange(0, SLOTS))[:, None]
        inside = (slot < slots) & (d < size)
        row = slot.to(tl.int64) * row_slot + tl.program_id(2) * row_head
        some = tl.load(base + (source * row_block + row) * size + d, mask=inside)
        tl.store(base + (target * row_block + row) * size + d, some, mask=inside)
