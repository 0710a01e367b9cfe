"""Writes the changed entries of a table: pairs (index, value)."""

import triton
import triton.language as tl


@triton.jit
def edit(edits, table, n_edits, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n_edits
    index = tl.load(edits + 2 * i, mask=inside, other=0)
    tl.store(table + index, tl.load(edits + 2 * i + 1, mask=inside, other=0), mask=inside)
