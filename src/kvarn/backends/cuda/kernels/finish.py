"""The end of a product: scale, bias, sum and store. All products share it."""

import triton
import triton.language as tl


@triton.jit
def finish(acc, column, row, bias, out, n_rows, n_columns, out_stride, scale, biased, adds):
    """acc is [columns, rows] of the output."""
    acc *= scale
    if biased:
        acc += tl.load(bias + column, mask=column < n_columns, other=0.0)[:, None]
    outputs = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    inside = (column < n_columns)[:, None] & (row < n_rows)[None, :]
    if adds:
        acc += tl.load(outputs, mask=inside, other=0.0)
    tl.store(outputs, acc, mask=inside)
