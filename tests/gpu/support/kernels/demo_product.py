"""out = a b^T, both [ROWS, DEPTH]."""

import triton
import triton.language as tl


@triton.jit
def demo_product(a, b, out, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    at = row[:, None] * DEPTH + column[None, :]
    total = tl.dot(tl.load(a + at), tl.trans(tl.load(b + at)), input_precision="ieee")
    tl.store(out + row[:, None] * ROWS + row[None, :], total)
