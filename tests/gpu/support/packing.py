"""The oracle of native.pack_planes: blocks of a GGUF file to planes (planes.py), with NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Bytes, Floats
from kvarn.backends.cuda.planes import GROUP, PACKED, Planes
from kvarn.loading.encodings import ENCODINGS

Codes = NDArray[np.uint8]  # [rows, blocks of the file, numbers of a block]


class Blocks(NamedTuple):
    """What blocks of the file contain. Scales and offsets are [rows, blocks of the planes]."""

    codes: Codes
    scales: Floats
    offsets: Floats | None


def peak(rows: Bytes, type_name: str) -> float:
    """A limit of the sizes of scales and offsets as headers have them, before the power of two."""
    raw, planes = _split(rows, type_name), PACKED[type_name]
    unit = 2.0 ** (14 + planes.bits)
    match type_name:
        case "Q4_0" | "Q8_0" | "Q5_0":  # the offset of Q5_0 is 16 scales, which is less
            return unit * _largest(_half(raw, 0))
        case "Q4_1" | "Q5_1":
            return max(unit * _largest(_half(raw, 0)), _largest(_half(raw, 2)))
        case "Q6_K":
            return unit * 128 * _largest(_half(raw, 208))
    return max(unit * 63 * _largest(_half(raw, 0)), 63 * _largest(_half(raw, 2)))


def packed(rows: Bytes, type_name: str, power: int) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Tiles [rows, units, tiles, span] and header words [rows, units, words]. Columns behind the row are zero."""
    planes, n = PACKED[type_name], len(rows)
    with np.errstate(all="ignore"):  # a scale of a damaged file may be infinite or NaN, and stays so
        found = READ[type_name](_split(rows, type_name))
        numbers = found.scales * np.float32(2.0 ** (14 + planes.bits + power))
        if found.offsets is not None:
            numbers = np.stack([numbers, found.offsets * np.float32(2.0**power)], -1)
        halves = numbers.reshape(n, -1).astype(np.float16)
    codes = found.codes.reshape(n, -1)
    units = planes.units(codes.shape[1])
    codes = np.pad(codes, ((0, 0), (0, units * planes.unit - codes.shape[1])))
    halves = np.pad(halves, ((0, 0), (0, units * planes.words * 2 - halves.shape[1])))
    words = halves.view(np.uint32).reshape(n, units, planes.words)
    return _tiles(planes, codes.reshape(n, units, planes.blocks, planes.span)), words


def offsets_of(rows: Bytes, type_name: str) -> Floats | None:
    return READ[type_name](_split(rows, type_name)).offsets


def group(tiles: NDArray[np.uint16], out: NDArray[np.uint16], row: int) -> None:
    """Tiles as they lie on the device, [rows / 16, units, tiles, 16, span], from this row on."""
    for i, each in enumerate(tiles, row):
        out[i // GROUP, :, :, i % GROUP] = each


def _tiles(planes: Planes, codes: Codes) -> NDArray[np.uint16]:
    """codes [rows, units, blocks, span]."""
    out = np.empty((*codes.shape[:2], planes.tiles, planes.span, 2), np.uint8)
    own = out[:, :, : planes.tiles - planes.upper]
    if planes.bits == 5:
        first, second, third = (codes[:, :, i] for i in range(3))
        np.bitwise_or(first, second << 5, out=own[:, :, 0, :, 0])
        np.bitwise_or(second >> 3, third << 2, out=own[:, :, 0, :, 1])
    else:
        if planes.upper:
            a, b, c, d = ((codes >> 4)[:, :, i::4] for i in range(4))  # in each of the two bytes
            out[:, :, -1] = (a | b << 2 | c << 4 | d << 6).swapaxes(2, 3)
            codes = codes & np.uint8(15)
        whole = codes if planes.field == 8 else codes[:, :, ::2] | codes[:, :, 1::2] << 4
        own[..., 0], own[..., 1] = whole[:, :, ::2], whole[:, :, 1::2]
    return out.view("<u2")[..., 0]


def _split(rows: Bytes, type_name: str) -> Bytes:
    """[rows, blocks, bytes of a block]."""
    return rows.reshape(len(rows), -1, ENCODINGS[type_name].block_bytes)


def _half(raw: Bytes, at: int) -> Floats:
    """The f16 at this byte of each block."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _largest(x: Floats) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


# -- types -------------------------------------------------------------------------------------------------------------


def _nibbles(raw: Bytes) -> Codes:
    """[..., n] bytes -> [..., 2, n] codes: low halves, then high halves."""
    return np.stack([raw & 15, raw >> 4], -2)


def _fifth(codes: Codes, bits: Bytes) -> Codes:
    """With a fifth bit for each of 32 numbers, in four bytes."""
    codes |= np.unpackbits(bits, axis=-1, bitorder="little") << 4
    return codes


def _q4_0(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[..., 2:]), _half(raw, 0), None)


def _q4_1(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[..., 6:]).reshape(*raw.shape[:2], 32)
    scales = _half(raw, 0)
    return Blocks(_fifth(codes, raw[..., 2:6]), scales, -16 * scales)


def _q5_1(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[..., 8:]).reshape(*raw.shape[:2], 32)
    return Blocks(_fifth(codes, raw[..., 4:8]), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Bytes) -> Blocks:
    return Blocks(raw[..., 2:] ^ np.uint8(128), _half(raw, 0), None)


def _sixes(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of Q4_K and Q5_K: eight of each in twelve bytes, six bits wide."""
    low, high, rest = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], -1)
    offsets = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], -1)
    wide = (_half(raw, at)[..., None] * x.astype(np.float32) for at, x in ((0, scales), (2, offsets)))
    by, minus = (x.reshape(len(raw), -1) for x in wide)
    return by, -minus


def _q4_k(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[..., 16:].reshape(*raw.shape[:2], 4, 32)), *_sixes(raw))


def _q5_k(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[..., 48:].reshape(*raw.shape[:2], 4, 32)).reshape(*raw.shape[:2], 8, 32)
    for i in range(8):
        codes[:, :, i] |= (raw[..., 16:48] >> i & 1) << 4
    return Blocks(codes, *_sixes(raw))


def _q6_k(raw: Bytes) -> Blocks:
    shape = raw.shape[:2]
    low, high = raw[..., :128].reshape(*shape, 2, 2, 32), raw[..., 128:192].reshape(*shape, 2, 32)
    codes = _nibbles(low.reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    for i in range(4):
        codes[:, :, :, i] |= (high >> 2 * i & 3) << 4
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32) * _half(raw, 208)[..., None]
    return Blocks(codes, scales.reshape(len(raw), -1), None)


READ: dict[str, Callable[[Bytes], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
