"""Queries and keys as attention takes them, and the write into the cache: HEADS heads of one token per program.

q and k are normalized per head, if the model does, and rotated in pairs (i, i + half). The centre is
subtracted from keys, if the model has one. Queries go to `q_out` in the type of the cells, keys and
values into the token's cell. In the repeated layout a KV head is stored `copies` times.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def rotate(
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
    q_out,
    k_cells,
    v_cells,
    n_heads,
    n_kv_heads,
    copies,
    dim,
    half,
    block_size,
    row_block,
    row_head,
    row_slot,
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
    d = tl.arange(0, BD)
    cell = tl.load(cells + token)
    block = (cell // block_size).to(tl.int64)
    slot = (cell % block_size).to(tl.int64)
    row = block * row_block + slot * row_slot
    place = tl.program_id(1)
    q_places, kv_places = tl.cdiv(n_heads, HEADS), tl.cdiv(n_kv_heads, HEADS)
    if place < q_places:
        head = place * HEADS + tl.arange(0, HEADS)
        inside = (head < n_heads)[:, None] & (d < dim)[None, :]
        at = head[:, None] * dim
        x = turned(q + token * q_stride + at, q_norm, q_normed, cos, sin, token, d, inside, dim, half, eps)
        tl.store(q_out + token * n_heads * dim + at + d[None, :], x.to(q_out.dtype.element_ty), mask=inside)
    elif cell >= 0:
        place -= q_places
        head = (place % kv_places) * HEADS + tl.arange(0, HEADS)
        inside = (head < n_kv_heads)[:, None] & (d < dim)[None, :]
        if place < kv_places:
            x = turned(
                k + token * k_stride + head[:, None] * dim, k_norm, k_normed, cos, sin, token, d, inside, dim, half, eps
            )
            if k_centred:
                x -= tl.load(k_centre + head[:, None] * dim + d[None, :], mask=inside, other=0.0)
            for i in range(copies):
                at = (row + (head * copies + i)[:, None] * row_head) * dim + d[None, :]
                tl.store(k_cells + at, x.to(k_cells.dtype.element_ty), mask=inside)
        else:
            x = tl.load(v + token * v_stride + head[:, None] * dim + d[None, :], mask=inside, other=0.0)
            for i in range(copies):
                at = (row + (head * copies + i)[:, None] * row_head) * dim + d[None, :]
                tl.store(v_cells + at, x.to(v_cells.dtype.element_ty), mask=inside)


@triton.jit
def turned(x, weight, normed, cos, sin, token, d, inside, dim, half, eps):
    """The heads at x [HEADS, 1], normalized and rotated. Numbers from 2 * half on are not rotated."""
    partner = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))
    a = tl.load(x + d[None, :], mask=inside, other=0.0)
    b = tl.load(x + partner[None, :], mask=inside, other=0.0)
    if normed:
        mean = tl.div_rn(tl.sum(a * a, 1), dim.to(tl.float32))
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        a = a * scale * tl.load(weight + d, mask=d < dim, other=0.0)[None, :]
        b = b * scale * tl.load(weight + partner, mask=d < dim, other=0.0)[None, :]
    turns = d < 2 * half
    pair = tl.where(d < half, d, d - half)
    c = tl.load(cos + token * half + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=turns, other=0.0)[None, :]
    return tl.where(turns[None, :], a * c + tl.where(d < half, -1.0, 1.0)[None, :] * b * s, a)
