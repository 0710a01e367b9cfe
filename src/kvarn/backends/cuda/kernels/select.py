"""out[i] = x[rows[i]]: only the rows that the step asks for, in the form in which they are read."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def select(rows, x, out, width, x_stride, out_stride, form, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(rows + row).to(tl.int64)
    part = tl.load(x + source * x_stride + column, mask=inside, other=0.0)
    store_in_form(form, out, row.to(tl.int64) * out_stride + column, part, inside)
