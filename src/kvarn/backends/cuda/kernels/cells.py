"""Rows of cells in registers, and the rotation in which codecs of few bits store them (docs/codecs.md).

CODEC says what the cells are: `plain` (numbers of the pointer's type), `int8`, `int4`, `int6`, or `any` of bf16
and these, as a number says at run time (specs.CODEC_CODES). Codes are multiplied in bf16: those of int8 are exact
in it, and so are those of int4 times their scale. What is left of a row's scale is its factor.

Codes are read as words of 16 bits, and instructions for two numbers of 16 bits make bf16 of them: conversions of
single bytes would take longer than it takes to read them. So numbers of a row that are not plain lie in registers
in the order of `channels`. Sums over numbers do not care, and outputs are stored by their channel.

    place of a block of 32      half odd j j j      (bits of its number)
    channel                     half j j j odd
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)  # numbers that are rotated together, and those of a scale of int4 and int6
TILE = tl.constexpr(32)  # positions that are encoded together in int4 and int6
BF16 = tl.constexpr(2)  # specs.CODEC_CODES
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)


@triton.constexpr_function
def tailed(KEYS, VALUES):
    """Whether there may be a tail."""
    return not {KEYS, VALUES} <= {"plain", "int8"}


@triton.constexpr_function
def instructions(text):
    """For two numbers of 16 bits. `1` and `-1`: of bf16."""
    constants = {"one": 0x3F80, "less": 0xBF80, "nothing": 0x8000, "middle4": 0xC1BC, "middle6": 0xC2BF}
    moves = "".join(f" mov.b32 {name}, 0x{bits << 16 | bits:08x};" for name, bits in constants.items())
    return "{ .reg .b32 a, b, " + ", ".join(constants) + ";" + moves + " " + text + " }"


# 16 + u as a bf16, from the bits of u in its mantissa, less 23.5.
FOUR = tl.constexpr("and.b32 a, a, 0x00780078; or.b32 a, a, 0x41804180; fma.rn.bf16x2 $0, a, one, middle4;")
# 128 and the lower seven bits, less 128, or less 256 if the highest bit is set.
EIGHT = tl.constexpr(
    "and.b32 b, a, 0x00800080; or.b32 b, b, 0x43004300; and.b32 a, a, 0x007f007f; or.b32 a, a, 0x43004300; "
    "fma.rn.bf16x2 $0, b, less, a;"
)


@triton.jit
def made(words, text: tl.constexpr):
    """bf16 from words, by instructions that read $1."""
    bits = tl.inline_asm_elementwise(instructions(text), "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def times(x, y):
    """A product of bf16, rounded once."""
    given = [x.to(tl.uint16, bitcast=True), tl.broadcast_to(y, x.shape)]
    text: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, nothing;"
    bits = tl.inline_asm_elementwise(instructions(text), "=r,r,r", given, dtype=tl.uint16, is_pure=True, pack=2)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def has_tail(k_codec, v_codec, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """1 if a query reads its own tile from the tail, otherwise 0."""
    if KEYS == "any":
        return ((k_codec >= INT4) | (v_codec >= INT4)).to(tl.int32)
    return 1 if tailed(KEYS, VALUES) else 0


@triton.jit
def end_of(pos, tail):
    """The keys before this position are read from cells by a query at `pos`."""
    return tl.where(tail != 0, pos // TILE * TILE, pos + 1)


@triton.jit
def turned_back(x, codec, CODEC: tl.constexpr):
    """Outputs [n, BD] as they are without the rotation of values."""
    if CODEC == "any":
        if codec != BF16:
            x = rotated(x, CODEC) * (1.0 / 32)
    elif CODEC != "plain":
        x = rotated(x, CODEC) * (1.0 / 32)
    return x


@triton.jit
def channels(BD: tl.constexpr, CODEC: tl.constexpr):
    d = tl.arange(0, BD)
    if CODEC != "plain":
        d = d // 16 * 16 + d % 8 * 2 + d // 8 % 2
    return d


@triton.jit
def rotated(x, CODEC: tl.constexpr):
    """The Hadamard matrix of 32 on each block of the rows [n, BD], which are in the order of `channels`."""
    if CODEC != "plain":
        return _stage(_stage(_stage(_stage(_stage(x, 8), 1), 2), 4), 16)
    return _stage(_stage(_stage(_stage(_stage(x, 1), 2), 4), 8), 16)


@triton.jit
def _stage(x, distance: tl.constexpr):
    """Sums and differences of the columns whose numbers differ in one bit."""
    a, b = halves(x, distance)
    both = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(both, x.shape)


@triton.jit
def halves(x, distance: tl.constexpr):
    """The columns of x [n, width] in which this bit of their number is 0, and those in which it is 1: each
    [n, width / (2 * distance), distance]."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * distance), 2, distance))
    return tl.split(tl.permute(pairs, (0, 1, 3, 2)))


@triton.constexpr_function
def prefetches(BD, BYTES):
    """Of the lines of 128 bytes that a row has at least, if it is padded to BD numbers of BYTES in registers."""
    least = 8 if BD == 64 else BD // 2 + 8  # specs.HEAD_DIMS, HEAD_MULTIPLE
    lines = range(0, least * BYTES, 128)
    return "".join(f"prefetch.global.L2 [$1+{at}]; prefetch.global.L2 [$2+{at}]; " for at in lines) + "mov.u32 $0, 0;"


@triton.jit
def prefetch_rows(k, v, row, wanted, width, BD: tl.constexpr, EARLY: tl.constexpr):
    """Bring plain rows of keys and values into the device's cache."""
    if EARLY:
        at = tl.where(wanted, row, 0) * width
        text: tl.constexpr = prefetches(BD, k.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(text, "=r,l,l", [k + at, v + at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_rows(cells, scales, row, wanted, width, codec, CODEC: tl.constexpr, BD: tl.constexpr):
    """Numbers [n, BD] of these rows, and a factor [n] of each. Rows that are not wanted are not read, because they may
    hold anything: they are zero."""
    factor = tl.full(row.shape, 1.0, tl.float32)
    if CODEC == "plain":
        d = tl.arange(0, BD)[None, :]
        x = tl.load((cells + row * width)[:, None] + d, mask=wanted[:, None] & (d < width), other=0)
    elif CODEC == "int8":
        x, factor = load_int8(cells, scales, row, wanted, width, BD)
    elif CODEC == "any":
        if codec == BF16:
            x = _load_bf16(cells, row, wanted, width, BD)
        elif codec == INT8:
            x, factor = load_int8(cells, scales, row, wanted, width, BD)
        elif codec == INT4:
            x = _load_blocks(cells, scales, row, wanted, width, "int4", BD)
        else:
            x = _load_blocks(cells, scales, row, wanted, width, "int6", BD)
    else:
        x = _load_blocks(cells, scales, row, wanted, width, CODEC, BD)
    return x, factor


@triton.jit
def load_own(cells, scales, tail, tail_scales, row, place, wanted, width, codec, CODEC: tl.constexpr, BD: tl.constexpr):
    """Rows of a query's own tile: in int8 from the tail, where they have the number `place`, if the codec has one."""
    if CODEC == "any":
        if codec == BF16:
            x = _load_bf16(cells, row, wanted, width, BD)
            factor = tl.full(row.shape, 1.0, tl.float32)
        elif codec == INT8:
            x, factor = load_int8(cells, scales, row, wanted, width, BD)
        else:
            x, factor = load_int8(tail, tail_scales, place, wanted, width, BD)
    else:
        x, factor = load_int8(tail, tail_scales, place, wanted, width, BD)
    return x, factor


@triton.jit
def load_int8(cells, scales, row, wanted, width, BD: tl.constexpr):
    n_halves = width // 32 * 2
    half, j = tl.arange(0, BD // 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    start = cells.to(tl.pointer_type(tl.uint16)) + row * n_halves * 8
    inside = wanted[:, None, None] & (half < n_halves)
    words = tl.load(start[:, None, None] + half * 8 + j, mask=inside, other=0)
    even = made(words, "mov.b32 a, $1; " + EIGHT)
    odd = made(words, "shr.b32 a, $1, 8; " + EIGHT)
    x = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 3, 2)), (row.shape[0], BD))
    return x, tl.load(scales.to(tl.pointer_type(tl.float32)) + row, mask=wanted, other=0.0)


@triton.jit
def _load_bf16(cells, row, wanted, width, BD: tl.constexpr):
    half = tl.arange(0, BD // 16)[None, :, None, None]
    d = half * 16 + tl.arange(0, 8)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    start = cells.to(tl.pointer_type(tl.bfloat16)) + row * width
    inside = wanted[:, None, None, None] & (d < width)
    x = tl.load(start[:, None, None, None] + d, mask=inside, other=0)
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (row.shape[0], BD))


@triton.jit
def _load_blocks(cells, scales, row, wanted, width, CODEC: tl.constexpr, BD: tl.constexpr):
    """Rows in int4 or int6: codes of 32 numbers with a scale."""
    n_blocks = width // 32
    block, j = tl.arange(0, BD // 32)[None, :, None], tl.arange(0, 8)[None, None, :]
    inside = wanted[:, None, None] & (block < n_blocks)
    words = cells.to(tl.pointer_type(tl.uint16))
    at = (row * n_blocks)[:, None, None] + block  # of a block, among all
    if CODEC == "int4":
        four = tl.load(words + at * 8 + j, mask=inside, other=0)
        low_even, high_even = made(four, "shl.b32 a, $1, 3; " + FOUR), made(four, "shr.b32 a, $1, 1; " + FOUR)
        low_odd, high_odd = made(four, "shr.b32 a, $1, 5; " + FOUR), made(four, "shr.b32 a, $1, 9; " + FOUR)
    else:
        four = tl.load(words + at * 12 + j, mask=inside, other=0)
        two = tl.load(words + at * 12 + 8 + j % 4, mask=inside, other=0) >> (j // 4 * 2).to(tl.uint16)
        low_even, high_even = _six(four << 1, two << 5), _six(four >> 3, two << 1)
        low_odd, high_odd = _six(four >> 7, two >> 3), _six(four >> 11, two >> 7)
    there = wanted[:, None] & (tl.arange(0, BD // 32)[None, :] < n_blocks)
    code = tl.load(scales + (row * n_blocks)[:, None] + tl.arange(0, BD // 32)[None, :], mask=there, other=0)
    wide = code.to(tl.uint16)
    scale = tl.where(wide == 0, 0, tl.where(wide == 255, 0x7FC0, (wide + 880) << 4)).to(tl.uint16)[:, :, None]
    low = tl.join(times(low_even, scale), times(low_odd, scale))
    high = tl.join(times(high_even, scale), times(high_odd, scale))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 3, 2)), (row.shape[0], BD))


@triton.jit
def _six(four, two):
    """64 + u as a bf16, less 95.5, from the lower four bits of u and the higher two where they belong."""
    bits = (four & 0x1E) | (two & 0x60) | 0x4280
    return made(bits.to(tl.uint16), "fma.rn.bf16x2 $0, $1, one, middle6;")


@triton.jit
def scale_of(code):
    """A scale of int4 and int6 from its u8."""
    wide = code.to(tl.int32)
    scale = ((wide + 880) << 20).to(tl.float32, bitcast=True)
    return tl.where(wide == 0, 0.0, tl.where(wide == 255, float("nan"), scale))
