"""Packed weights to f16: what a product and an embedding share (planes.py says what the planes are).

The code of a weight is shifted to the highest bits of the mantissa of an f16 whose exponent is zero. As a
number this is code * 2^-(14 + bits), so one fma makes the weight: scale' code' + offset, rounded once.
Codes of weights without offsets have their zero in the middle, which is 2^-15 for every number of bits.

Inline assembly is elementwise: it works on two elements of 16 bits at a time, and the mask keeps what a
shift brings from one into the other out.
"""

import triton
import triton.language as tl

MIDDLE = tl.constexpr(-(2.0**-15))


@triton.constexpr_function
def shifted(left, mask):
    """Instructions for elements shifted left, or right if the number is negative, and masked."""
    pair = f"0x{mask << 16 | mask:08x}"
    shift = f"shl.b32 both, $1, {left};" if left > 0 else f"shr.b32 both, $1, {-left};"
    return "{ .reg .b32 both; " + shift + " and.b32 $0, both, " + pair + "; }"


@triton.jit
def field(tile, left: tl.constexpr, mask: tl.constexpr):
    return tl.inline_asm_elementwise(shifted(left, mask), "=r,r", [tile], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def half(word, i: tl.constexpr):
    """One of the two f16 in a word of the header, as a column."""
    return (word >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)[:, None]
