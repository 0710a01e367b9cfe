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
    WORDS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """moves: (source, destination, slots). parts: where each array starts in the arena, and how large a row of it is,
    in bytes. Rows of whole words are copied word by word; other rows are short."""
    move = moves + tl.program_id(0) * 3
    source, target, slots = tl.load(move).to(tl.int64), tl.load(move + 1).to(tl.int64), tl.load(move + 2)
    base = arena + tl.load(parts + 2 * tl.program_id(1))
    size = tl.load(parts + 2 * tl.program_id(1) + 1)
    words = base.to(tl.pointer_type(tl.int32))
    n_words = tl.where(size % 4 == 0, size // 4, 0)
    n_bytes = tl.where(size % 4 == 0, 0, size)
    w, b = tl.arange(0, WORDS)[None, :], tl.arange(0, BYTES)[None, :]
    for start in range(0, slots, SLOTS):
        slot = (start + tl.arange(0, SLOTS))[:, None]
        row = slot.to(tl.int64) * row_slot + tl.program_id(2) * row_head
        old, new = source * row_block + row, target * row_block + row
        inside = (slot < slots) & (w < n_words)
        tl.store(words + new * n_words + w, tl.load(words + old * n_words + w, mask=inside), mask=inside)
        inside = (slot < slots) & (b < n_bytes)
        tl.store(base + new * n_bytes + b, tl.load(base + old * n_bytes + b, mask=inside), mask=inside)
