"""out = activation(gate) * up * scale, in the form that the matrix takes."""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import rounded


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def gate(
    gate,
    up,
    out,
    width,
    gate_stride,
    up_stride,
    out_stride,
    scale,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    if ACTIVATION == "silu":
        y = g * sigmoid(g)
    else:  # gelu: 0.5 g (1 + tanh(z)) = g sigmoid(2 z)
        cube = g * g * g
        y = g * sigmoid(1.5957691216057308 * tl.fma(cube, 0.044715, g))
    tl.store(out + row * out_stride + column, rounded(y * u * scale, out), mask=inside)
