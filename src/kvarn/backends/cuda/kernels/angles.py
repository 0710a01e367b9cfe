"""Cosine and sine of the rotation of each token, [tokens, half], times a magnitude.

`turns` are whole turns per position, in f64: a position of a million needs them. The whole turns are
taken off in f64, and the rest is an angle in f32.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait


@triton.jit
def angles(positions, turns, cos, sin, half, magnitude, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    turn = tl.load(positions + row).to(tl.float64) * tl.load(turns + pair, mask=inside, other=0.0)
    angle = ((turn - tl.floor(turn)) * 6.283185307179586).to(tl.float32)
    tl.store(cos + row * half + pair, tl.cos(angle) * magnitude, mask=inside)
    tl.store(sin + row * half + pair, tl.sin(angle) * magnitude, mask=inside)
