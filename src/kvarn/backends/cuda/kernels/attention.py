"""The arithmetic that `decode`, `prefill` and `reduce` share.

Keys are summed up in splits of SPLIT tokens at absolute positions, each split in tiles of TILE keys with a
running maximum. Splits are then added in ascending order (`fold`). Which program computes a split, and
which blocks hold its keys, has no effect on a bit. A split or tile in which a row sees no key changes
nothing, so it may be left out.
"""

import triton
import triton.language as tl


@triton.jit
def seen_by(query, key, window, pinned):
    """LayerSpec.visible. Without a window, `window` is larger than every position."""
    return (key <= query) & ((key > query - window) | (key < pinned))


@triton.jit
def first_split(lowest, window, pinned, SPLIT: tl.constexpr):
    """(splits of pinned tokens, first split of the window) of a query at position `lowest`. Where the two meet,
    nothing lies between them."""
    pins = tl.where(lowest >= window, (pinned + SPLIT - 1) // SPLIT, 0)
    first = tl.maximum(lowest - window + 1, 0) // SPLIT
    return pins, tl.maximum(first, pins)


@triton.jit
def block_of(table, shift, row, key, wanted, table_width, block_size, pinned_blocks):
    """The physical block of each key that is wanted, by the table of the sequence."""
    logical = key // block_size
    entry = tl.where(logical < pinned_blocks, logical, logical - shift)
    return tl.load(table + row * table_width + entry, mask=wanted, other=0).to(tl.int64)


@triton.jit
def with_sign(query, scale):
    """The query with the sign of the scale, and a scale above 0: scores that are -inf stay so."""
    sign = tl.where(scale > 0.0, 1.0, tl.where(scale < 0.0, -1.0, 0.0))
    return (query * sign).to(query.dtype), tl.where(scale == 0.0, 1.0, tl.abs(scale))


@triton.jit
def scored(query, keys, factor, KEYS: tl.constexpr):
    """Scores [rows, TILE] of keys with a factor each."""
    s = tl.dot(query, tl.trans(keys), input_precision="ieee")
    return s if KEYS == "plain" else s * factor[None, :]


@triton.jit
def add_tile(s, scale, v, factor, peak, mass, acc, VALUES: tl.constexpr):
    """One tile of scores [rows, TILE], which are -inf for keys that are not seen, and values [TILE, BD] with a factor
    each. Scores times `scale`, which is above 0, are in powers of two. A score that is NaN makes the sums NaN."""
    top = tl.maximum(peak, tl.max(s, 1) * scale)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(tl.fma(s, tl.broadcast_to(scale, s.shape), tl.broadcast_to(-shift[:, None], s.shape)))
    p = weight.to(v.dtype)
    old = tl.exp2(peak - shift)[:, None]
    # The sum of p by a product with ones: the order of tl.sum depends on the shape of the tile.
    ones = tl.full((s.shape[1], mass.shape[1]), 1.0, v.dtype)
    mass = tl.dot(p, ones, mass * old, input_precision="ieee")
    if VALUES == "plain":
        acc = tl.dot(p, v, acc * old, input_precision="ieee")
    else:
        acc = tl.dot((weight * factor[None, :]).to(v.dtype), v, acc * old, input_precision="ieee")
    return top, mass, acc


@triton.jit
def only_finite(s, v, factor, VALUES: tl.constexpr):
    """Scores, values and factors in which a key with a value that is not finite makes a row NaN only if the row sees
    it."""
    if VALUES != "plain":
        finite = tl.abs(factor) < float("inf")
        s, factor = tl.where(finite[None, :], s, float("nan")), tl.where(finite, factor, 0.0)
    if VALUES != "int8":
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        spoilt = tl.min(finite.to(tl.int32), 1) == 0
        s, v = tl.where(spoilt[None, :], float("nan"), s), tl.where(finite, v, 0.0)
    return s, v, factor


@triton.jit
def factors(peak, split_peak, split_mass):
    """What the sums so far and those of a split are multiplied by before they are added. A split without a key that
    the row sees leaves the sums as they are. One with NaN only has no peak, either, but a mass."""
    top = tl.maximum(peak, split_peak)
    shift = tl.where(top == float("-inf"), 0.0, top)
    empty = (split_peak == float("-inf")) & (split_mass == 0.0)
    return top, tl.exp2(peak - shift), tl.exp2(split_peak - shift), empty


@triton.jit
def fold(total, part, old, new, empty):
    return tl.where(empty, total, tl.fma(part, tl.broadcast_to(new, part.shape), total * old))


@triton.jit
def folded(total_peak, total_mass, total, peak, mass, acc):
    """The sums so far with those of one split more."""
    total_peak, old, new, empty = factors(total_peak, peak, tl.max(mass, 1))
    old, new, empty = old[:, None], new[:, None], empty[:, None]
    return total_peak, fold(total_mass, mass, old, new, empty), fold(total, acc, old, new, empty)
