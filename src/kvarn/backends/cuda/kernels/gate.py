"""out = activation(gate) * up * scale, in the form that the matrix takes: of matrices that are no single product. The
product of one does it itself (tiles.py).
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.early import release, wait
from kvarn.backends.cuda.kernels.form import store_in_form


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def gelu(x):
    """0.5 x (1 + tanh(z)) = x sigmoid(2 z)."""
    return x * sigmoid(1.5957691216057308 * tl.fma(x * x * x, 0.044715, x))


@triton.jit
def activated(x, activation):
    """specs.ACTIVATION_CODES."""
    return silu(x) if activation == 1 else gelu(x)


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
    activation,
    form,
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
    store_in_form(form, out, row * out_stride + column, activated(g, activation) * u * scale, inside)
