"""out = scale weight x + bias, or out += the same: a tile of columns and rows per program.

weight is [columns, depth] with rows of a padded length, x has rows of the same padded length. The
padding of x is zero, and that of weight too, so nothing is masked while reading. x has rows up to a
multiple of BM, whatever they contain: a row of the result depends on its own row of x only.

The weights are the left operand, so that one row is padded to BM, not to 64. One accumulator runs
through the depth in order, so a row has the same bits whatever BM and BN are.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.finish import finish


@triton.jit
def linear(
    x,
    weight,
    bias,
    out,
    n_rows,
    n_columns,
    depth,
    out_stride,
    scale,
    biased,
    adds,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight + column.to(tl.int64)[:, None] * depth + k[None, :]
    inputs = x + row.to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for _ in range(0, depth, BK):
        acc = tl.dot(tl.load(weights), tl.load(inputs), acc, input_precision="ieee")
        weights += BK
        inputs += BK
    finish(acc, column, row, bias, out, n_rows, n_columns, out_stride, scale, biased, adds)
