"""`rotate` for cells that are not plain: HEADS heads of one token per program.

Keys and values in int8 are rotated and rounded (docs/codecs.md). Their codes and scales go into the token's cell,
or, if the codec has a tail, to the token's place in it. Places from `near` on are beside the tail, in the order of
tokens: attention of this step still reads what is in the tail. Queries go to `q_out` in bf16, rotated like keys.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.cells import BF16, INT4, TILE, rotated
from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.rotate import turned


@triton.jit
def encode(
    q,
    k,
    v,
    q_stride,
    k_stride,
    v_stride,
    q_norm,
    k_norm,
    k_centre,
    cos,
    sin,
    cells,
    places,
    q_out,
    k_cells,
    v_cells,
    k_scale,
    v_scale,
    k_tail,
    v_tail,
    k_tail_scale,
    v_tail_scale,
    k_new,
    v_new,
    k_new_scale,
    v_new_scale,
    near,
    n_heads,
    n_kv_heads,
    copies,
    dim,
    k_width,
    v_width,
    half,
    block_size,
    row_block,
    row_head,
    row_slot,
    tail_block,
    tail_head,
    tail_slot,
    k_codec,
    v_codec,
    q_normed,
    k_normed,
    k_centred,
    eps,
    HEADS: tl.constexpr,
    BD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + token)
    turn = tl.program_id(1)
    q_turns, kv_turns = tl.cdiv(n_heads, HEADS), tl.cdiv(n_kv_heads, HEADS)
    is_query, is_key = turn < q_turns, (turn >= q_turns) & (turn < q_turns + kv_turns)
    if is_query | (cell >= 0):
        first = tl.where(is_query, turn, (turn - q_turns) % tl.maximum(kv_turns, 1))
        head, d = first * HEADS + tl.arange(0, HEADS), tl.arange(0, BD)
        there = head < tl.where(is_query, n_heads, n_kv_heads)
        inside = there[:, None] & (d < dim)[None, :]
        at = head[:, None] * dim
        if is_query:
            x = turned(q + token * q_stride + at, q_norm, q_normed, cos, sin, token, d, inside, dim, half, eps)
        elif is_key:
            x = turned(k + token * k_stride + at, k_norm, k_normed, cos, sin, token, d, inside, dim, half, eps)
            if k_centred:
                x -= tl.load(k_centre + at + d[None, :], mask=inside, other=0.0)
        else:
            x = tl.load(v + token * v_stride + at + d[None, :], mask=inside, other=0.0)
        codec = tl.where(is_query | is_key, k_codec, v_codec)
        width = tl.where(is_query | is_key, k_width, v_width)
        if codec != BF16:
            x = rotated(x, "plain")
        inside = there[:, None] & (d < width)[None, :]
        if is_query:
            tl.store(q_out + (token * n_heads + head[:, None]) * width + d[None, :], x.to(tl.bfloat16), mask=inside)
        else:
            row = (cell // block_size).to(tl.int64) * row_block + (cell % block_size).to(tl.int64) * row_slot
            step = row_head
            to, scales = tl.where(is_key, k_cells, v_cells), tl.where(is_key, k_scale, v_scale)
            if codec >= INT4:
                place = tl.load(places + token)
                is_new = place >= near
                place = tl.where(is_new, place - near, place).to(tl.int64)
                row, step = place // TILE * tail_block + place % TILE * tail_slot, tail_head
                if is_new:
                    k_tail, v_tail, k_tail_scale, v_tail_scale = k_new, v_new, k_new_scale, v_new_scale
                to = tl.where(is_key, k_tail, v_tail).to(tl.pointer_type(tl.uint8))
                scales = tl.where(is_key, k_tail_scale, v_tail_scale).to(tl.pointer_type(tl.uint8))
            if codec == BF16:
                for i in range(copies):
                    line = (row + (head * copies + i) * step)[:, None] * width
                    tl.store(to.to(tl.pointer_type(tl.bfloat16)) + line + d[None, :], x.to(tl.bfloat16), mask=inside)
            else:
                codes, scale = _in_int8(x)
                for i in range(copies):
                    line = row + (head * copies + i) * step
                    tl.store(to.to(tl.pointer_type(tl.int8)) + line[:, None] * width + d[None, :], codes, mask=inside)
                    tl.store(scales.to(tl.pointer_type(tl.float32)) + line, scale, mask=there)


@triton.jit
def _in_int8(y):
    """Codes of rotated heads [HEADS, BD], and a scale of each."""
    size = tl.abs(y)
    finite = size < float("inf")
    top = tl.max(tl.where(finite, size, 0.0), 1)
    scale = tl.where(tl.min(finite.to(tl.int32), 1) == 1, tl.div_rn(top, 127.0), float("nan"))
    usable = scale > 0.0
    ratio = tl.div_rn(y, tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], y.shape))
    ratio = tl.where(usable[:, None], tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
    # Half to even: 1.5 * 2^23 has no room for a fraction.
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int8), scale
