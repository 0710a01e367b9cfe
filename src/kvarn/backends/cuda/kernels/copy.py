"""Copies the first slots of a block to another block: one move, one layer's K or V, one head per program."""

import triton
import triton.language as tl


@triton.jit
def copy(
    moves,
    arena,
    offsets,
    units,
    k_block,
    k_head,
    k_slot,
    v_block,
    v_head,
    v_slot,
    SLOTS: tl.constexpr,
    BD: tl.constexpr,
):
    """moves: (source, destination, slots). offsets: where K of each layer starts in the arena, then V, in units."""
    move = moves + tl.program_id(0) * 3
    source, target, slots = tl.load(move).to(tl.int64), tl.load(move + 1).to(tl.int64), tl.load(move + 2)
    part, head = tl.program_id(1), tl.program_id(2)
    if part % 2 == 0:
        block_stride, head_stride, slot_stride = k_block, k_head, k_slot
    else:
        block_stride, head_stride, slot_stride = v_block, v_head, v_slot
    base = arena + tl.load(offsets + part) + head * head_stride
    d = tl.arange(0, BD)[None, :]
    for start in range(0, slots, SLOTS):
        slot = (start + tl.arange(0, SLOTS))[:, None]
        inside = (slot < slots) & (d < units)
        at = slot.to(tl.int64) * slot_stride + d
        tl.store(
            base + target * block_stride + at, tl.load(base + source * block_stride + at, mask=inside), mask=inside
        )
