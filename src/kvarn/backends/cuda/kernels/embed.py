"""The embeddings of the step's tokens: rows of a matrix, times a factor. Token -1 - r is the one that draw r of the
last step has sampled; if it is an error, any row will do, because the request fails."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import load_in_form


@triton.jit
def embed(tokens, sampled, weight, out, width, weight_stride, scale, form, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = load_in_form(form, weight, token_of(tokens, sampled, row) * weight_stride + column, inside)
    tl.store(out + row.to(tl.int64) * width + column, x * scale, mask=inside)


@triton.jit
def token_of(tokens, sampled, row):
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.maximum(tl.load(sampled - 1 - token), 0)
    return token.to(tl.int64)
