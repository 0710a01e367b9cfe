"""The embeddings of the step's tokens: rows of a matrix, times a factor."""

import triton
import triton.language as tl


@triton.jit
def embed(tokens, weight, out, width, weight_stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(weight + token * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, x * scale, mask=inside)
