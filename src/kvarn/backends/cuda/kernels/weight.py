"""Scores in an order of integers, and weights of tokens as whole numbers: what engine/sampling.py computes, bit by bit.

Sums of whole numbers have one result in any order, so a draw does not depend on how a row is cut into programs. The
exponential is native/elementary.hpp in the same operations.
"""

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(score):
    """An i32 that is larger for a larger f32. Zeros are equal, and NaN is the largest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def distance(score, peak, temperature):
    """(score - peak) / temperature in f64, at least -64: the weight is zero from there on."""
    x = (score.to(tl.float64) - peak.to(tl.float64)) / temperature
    return tl.where(x > -64.0, x, -64.0)


@triton.jit
def weight(x):
    """exp(x) 2^44 for -64 <= x <= 0, rounded half to even."""
    shifted = x * 1.4426950408889634 + 6755399441055744.0  # log2(e); 1.5 * 2^52 rounds to an integer
    k = shifted - 6755399441055744.0
    r = (x - k * 0.6931471803691238) - k * 1.9082149292705877e-10  # ln 2 in two parts
    p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    grown = 1.0 + (r + r * r * p)
    exponent = ((shifted.to(tl.int64, bitcast=True) + 1022) << 52).to(tl.float64, bitcast=True)
    rounded = grown * 2.0 * exponent * 17592186044416.0 + 6755399441055744.0
    return rounded.to(tl.int64, bitcast=True) - 0x4338000000000000


@triton.jit
def bucket_of(x, BUCKETS: tl.constexpr):
    """Of a distance: tokens of a lower bucket have larger scores."""
    return tl.minimum((x * -64.0).to(tl.int32), BUCKETS - 1)
