"""A function that another kernel imports."""

import triton


@triton.jit
def one_more(x):
    return x + 1.0
