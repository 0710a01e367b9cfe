"""Blocks of quantized GGUF types: of given numbers where the `gguf` package can quantize, and random otherwise."""

import numpy as np
from numpy.typing import NDArray

from kvarn import native
from kvarn.backends.cuda.planes import GROUP, PACKED, Planes, peak, shift
from kvarn.cache.spec import align
from kvarn.loading.encodings import ENCODINGS

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the package makes these
# Bytes of a block at which an f16 is, and the root mean square of random numbers of the type with scales of one.
RANDOM = {"Q3_K": ((108,), 42), "Q4_K": ((0, 2), 320), "Q5_K": ((0, 2), 650), "Q6_K": ((208,), 1370)}


def blocks(type_name: str, shape: tuple[int, ...], random: np.random.Generator, size: float = 1.0) -> NDArray[np.uint8]:
    """Rows of weights of about this size, of both signs, [rows, bytes of a row]."""
    if type_name in QUANTIZED:
        import gguf

        numbers = random.standard_normal(shape, np.float32) * np.float32(size)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[type_name])
    encoding = ENCODINGS[type_name]
    found = random.integers(0, 256, (shape[0], shape[1] // encoding.block_size, encoding.block_bytes), np.uint8)
    places, mean = RANDOM[type_name]
    for at in places:
        scales = random.uniform(0.5, 1.5, found.shape[:2]) * random.choice((-size, size), found.shape[:2]) / mean
        found[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return found.reshape(shape[0], -1)


def room(type_name: str, rows: NDArray[np.uint8], n_rows: int) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Codes and headers for so many rows of this width, whole groups, all bits set."""
    encoding, planes, n = ENCODINGS[type_name], PACKED[type_name], align(n_rows, GROUP)
    units = planes.units(rows.shape[1] // encoding.block_bytes * encoding.block_size)
    codes = np.full((n // GROUP, units, planes.tiles, GROUP, planes.span), 0xFFFF, np.uint16)
    return codes, np.full((units, planes.words, n), 0xFFFFFFFF, np.uint32)


def planes_of(type_name: str, rows: NDArray[np.uint8]) -> tuple[Planes, int, NDArray[np.uint16], NDArray[np.uint32]]:
    """Planes, the power of two, codes and headers, for whole groups of rows. Those that are missing are zero."""
    power = shift(peak(rows, type_name))
    codes, headers = room(type_name, rows, len(rows))
    codes[-1], headers[..., len(rows) :] = 0, 0
    native.pack_planes(type_name, rows, power, codes, 0, headers, 0)
    return PACKED[type_name], power, codes, headers
