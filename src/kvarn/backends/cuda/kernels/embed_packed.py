"""The embeddings of the step's tokens from a packed matrix (planes.py), times a factor. Tokens are those of `embed`.

One specialisation serves all planes: rows are few, so what describes the planes are arguments.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.embed import token_of
from kvarn.backends.cuda.kernels.unpack import MIDDLE


@triton.jit
def embed_packed(
    tokens,
    sampled,
    codes,
    headers,
    out,
    width,
    padded,
    units,
    bits,
    field,
    offsets,
    blocks,
    span,
    tiles,
    words,
    scale,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = token_of(tokens, sampled, row)
    unit, block = column // (blocks * span), column // span % blocks
    each, tile_size = 16 // field, 16 * span
    first = (token // 16 * units + unit) * (tiles * tile_size) + token % 16 * span + column % span
    element = tl.load(codes + first + block // each * tile_size, mask=inside, other=0).to(tl.int32)
    code = (element >> (block % each * field)) & ((1 << field) - 1)
    if field < bits:
        upper = tl.load(codes + first + (tiles - 1) * tile_size, mask=inside, other=0).to(tl.int32)
        code |= ((upper >> (2 * block)) & 3) << field
    number = (code << (10 - bits)).to(tl.uint16).to(tl.float16, bitcast=True)
    place = tl.where(offsets != 0, block, block // 2)
    word = tl.load(headers + (unit * words + place).to(tl.int64) * padded + token, mask=inside, other=0)
    low, high = word.to(tl.uint16).to(tl.float16, bitcast=True), (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    by = tl.where((offsets == 0) & (block % 2 == 1), high, low)
    plus = tl.where(offsets != 0, high, by * MIDDLE)
    x = tl.fma(by, number, plus).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, x * scale, mask=inside)
