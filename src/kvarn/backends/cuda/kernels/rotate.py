"""Queries and keys as attention takes them, and the write into the cache: one head of one token per program.

q and k are normalized per head, if the model does, and rotated in pairs (i, i + half). Queries go to
`q_out` in the type of the cells, keys and values into the token's cell. In the repeated layout a KV head
is stored `copies` times.
"""

import triton
import triton.language as tl


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
    k_block,
    k_head,
    k_slot,
    v_block,
    v_head,
    v_slot,
    q_normed,
    k_normed,
    eps,
    BD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < dim
    cell = tl.load(cells + token)
    block = (cell // block_size).to(tl.int64)
    slot = (cell % block_size).to(tl.int64)
    if head < n_heads:
        x = _turned(q + token * q_stride + head * dim, q_norm, q_normed, cos, sin, token, d, dim, half, eps)
        tl.store(q_out + (token * n_heads + head) * dim + d, x.to(q_out.dtype.element_ty), mask=inside)
    elif cell >= 0:
        if head < n_heads + n_kv_heads:
            head -= n_heads
            x = _turned(k + token * k_stride + head * dim, k_norm, k_normed, cos, sin, token, d, dim, half, eps)
            at = k_cells + block * k_block + slot * k_slot + d
            for i in range(copies):
                tl.store(at + (head * copies + i) * k_head, x.to(k_cells.dtype.element_ty), mask=inside)
        else:
            head -= n_heads + n_kv_heads
            x = tl.load(v + token * v_stride + head * dim + d, mask=inside, other=0.0)
            at = v_cells + block * v_block + slot * v_slot + d
            for i in range(copies):
                tl.store(at + (head * copies + i) * v_head, x.to(v_cells.dtype.element_ty), mask=inside)


@triton.jit
def _turned(x, weight, normed, cos, sin, token, d, dim, half, eps):
    """The head at x, normalized and rotated. Numbers from 2 * half on are not rotated."""
    inside = d < dim
    partner = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))
    a = tl.load(x + d, mask=inside, other=0.0)
    b = tl.load(x + partner, mask=inside, other=0.0)
    if normed:
        mean = tl.div_rn(tl.sum(a * a, 0), dim.to(tl.float32))
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        a = a * scale * tl.load(weight + d, mask=inside, other=0.0)
        b = b * scale * tl.load(weight + partner, mask=inside, other=0.0)
    turns = d < 2 * half
    pair = tl.where(d < half, d, d - half)
    c = tl.load(cos + token * half + pair, mask=turns, other=1.0)
    s = tl.load(sin + token * half + pair, mask=turns, other=0.0)
    return tl.where(turns, a * c + tl.where(d < half, -b, b) * s, a)
