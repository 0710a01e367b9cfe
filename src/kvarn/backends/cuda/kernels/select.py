"""out[i] = x[rows[i]]: only the rows that the step asks for."""

import triton
import triton.language as tl


@triton.jit
def select(rows, x, out, width, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(rows + row).to(tl.int64)
    part = tl.load(x + source * x_stride + column, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + column, part, mask=inside)
