"""Brings rows in int8 that lie beside the tail into it, after attention: a token and stored head of K or V per
program. `kept` has the place in the tail of each token, or -1.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.cells import INT4, TILE
from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def keep(
    kept,
    k_tail,
    v_tail,
    k_tail_scale,
    v_tail_scale,
    k_new,
    v_new,
    k_new_scale,
    v_new_scale,
    n_heads,
    k_width,
    v_width,
    tail_block,
    tail_head,
    tail_slot,
    k_codec,
    v_codec,
    BD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % n_heads
    place = tl.load(kept + token).to(tl.int64)
    if place >= 0:
        old = place // TILE * tail_block + place % TILE * tail_slot + head * tail_head
        new = token // TILE * tail_block + token % TILE * tail_slot + head * tail_head
        is_key = tl.program_id(1) < n_heads
        if tl.where(is_key, k_codec, v_codec) >= INT4:
            width = tl.where(is_key, k_width, v_width)
            d = tl.arange(0, BD)
            codes = tl.load(tl.where(is_key, k_new, v_new) + new * width + d, mask=d < width)
            tl.store(tl.where(is_key, k_tail, v_tail) + old * width + d, codes, mask=d < width)
            scale = tl.load(tl.where(is_key, k_new_scale, v_new_scale) + new)
            tl.store(tl.where(is_key, k_tail_scale, v_tail_scale) + old, scale)
