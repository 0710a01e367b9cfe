"""Draws a token: one draw per program.

Tokens stand in the order of their scores, equal ones in the order of their ids. top_k, top_p and min_p each keep a
first part of that order, and the uniform number is a place in the mass of what is kept. A place is found in two
steps: its bucket, then its score by bisection in the bucket. No sum depends on the order in which a bucket is.
"""

import triton
import triton.language as tl

from kvarn.backends.cuda.kernels.weight import distance, key_of, score_of, weight


@triton.jit
def member(at, n, members, logits, top, temperature, BLOCK: tl.constexpr):
    """Tokens of a bucket from `at` on, their keys and weights."""
    place = at + tl.arange(0, BLOCK)
    inside = place < n
    token = tl.load(members + place, mask=inside, other=0)
    score = tl.load(logits + token, mask=inside, other=float("-inf"))
    w = tl.where(inside, weight(distance(score, top, temperature)), 0)
    return token, key_of(score).to(tl.int64), w, inside


@triton.jit
def above(least, key, w, n, members, logits, top, temperature, BLOCK: tl.constexpr):
    """The number and the mass of members with a key of at least this. key and w: of the first ones."""
    high = key >= least
    count = tl.sum((high & (w > 0)).to(tl.int32), 0)
    mass = tl.sum(tl.where(high, w, 0), 0)
    for at in range(BLOCK, n, BLOCK):
        _, k, more, _ = member(at, n, members, logits, top, temperature, BLOCK)
        high = k >= least
        count += tl.sum((high & (more > 0)).to(tl.int32), 0)
        mass += tl.sum(tl.where(high, more, 0), 0)
    return count, mass


@triton.jit
def find(
    target,
    counts,
    masses,
    members,
    logits,
    top,
    temperature,
    width,
    counted,
    named,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first token such that the amount up to it is more than `target`: the mass up to it, and its id if `named`.
    The amount is the number of tokens if `counted`, otherwise the mass."""
    amount = tl.where(counted, counts.to(tl.int64), masses)
    bucket = tl.sum((tl.cumsum(amount, 0) <= target).to(tl.int32), 0)
    index = tl.arange(0, BUCKETS)
    before = tl.sum(tl.where(index < bucket, masses, 0), 0)
    rest = target - tl.sum(tl.where(index < bucket, amount, 0), 0)
    members += tl.sum(tl.where(index < bucket, counts, 0), 0)
    n = tl.sum(tl.where(index == bucket, counts, 0), 0)

    token, key, w, inside = member(0, n, members, logits, top, temperature, BLOCK)
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(inside, key, -0x80000000), 0) + 1
    for at in range(BLOCK, n, BLOCK):
        _, k, _, more = member(at, n, members, logits, top, temperature, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(more, k, 0x7FFFFFFF), 0))
        high = tl.maximum(high, tl.max(tl.where(more, k, -0x80000000), 0) + 1)
    while high - low > 1:  # the amount from `low` on is more than `rest`, and that from `high` on is not
        middle = (low + high) >> 1
        count, mass = above(middle, key, w, n, members, logits, top, temperature, BLOCK)
        beyond = tl.where(counted, count.to(tl.int64), mass) > rest
        low = tl.where(beyond, middle, low)
        high = tl.where(beyond, high, middle)

    count, mass = above(high, key, w, n, members, logits, top, temperature, BLOCK)
    each = weight(distance(score_of(low.to(tl.int32)), top, temperature))
    nth = tl.where(counted, rest - count, (rest - mass) // each)
    through = before + mass + (nth + 1) * each
    found = tl.full((), 0, tl.int32)
    if named:  # the nth id of the equal ones
        first, last = tl.full((), -1, tl.int32), width - 1
        while last - first > 1:  # up to `first` there are at most nth of them, up to `last` more
            middle = first + (last - first) // 2
            upto = tl.sum((inside & (key == low) & (token <= middle)).to(tl.int32), 0)
            for at in range(BLOCK, n, BLOCK):
                t, k, _, more = member(at, n, members, logits, top, temperature, BLOCK)
                upto += tl.sum((more & (k == low) & (t <= middle)).to(tl.int32), 0)
            beyond = upto > nth
            last = tl.where(beyond, middle, last)
            first = tl.where(beyond, first, middle)
        found = last
    return through, found


@triton.jit
def draw(
    draws,
    rows,
    logits,
    tokens,
    tops,
    settings,
    counts,
    masses,
    kept,
    members,
    stride,
    SETTINGS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """settings: temperature, top_k, top_p, min_p times 2^44, the uniform number, ... of each draw."""
    slot = tl.program_id(0).to(tl.int64)
    which = tl.load(draws + slot)
    if tl.load(tokens + which) >= 0:
        given = settings + which * SETTINGS
        temperature, top_p, uniform = tl.load(given), tl.load(given + 2), tl.load(given + 4)
        top_k = tl.load(given + 1).to(tl.int32)
        top = tl.load(tops + which)
        logits += tl.load(rows + which).to(tl.int64) * stride
        members += slot * stride
        index = slot * BUCKETS + tl.arange(0, BUCKETS)
        count, mass = tl.load(counts + index), tl.load(masses + index)
        total = tl.sum(mass, 0)
        for stage in range(3):  # in a loop, so that there is one copy of `find`
            if stage == 0:
                target, needed = (top_k - 1).to(tl.int64), (top_k > 0) & (top_k < tl.sum(count, 0))
            elif stage == 1:
                target, needed = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1) - 1, top_p < 1.0
            else:
                total = tl.minimum(total, tl.load(kept + slot))
                target, needed = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1), top_p == top_p
            if needed:
                total, token = find(
                    target,
                    count,
                    mass,
                    members,
                    logits,
                    top,
                    temperature,
                    stride,
                    stage == 0,
                    stage == 2,
                    BUCKETS,
                    BLOCK,
                )
                if stage == 2:
                    tl.store(tokens + which, token)
