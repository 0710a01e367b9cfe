"""Random rows of every stored type of weights, and what the gguf package makes of them."""

import gguf
import numpy as np

from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.quants import READABLE

TYPES = sorted(READABLE)
F16_SCALES = {  # where a block keeps its f16 numbers
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "F16": (0,),
    "BF16": (0,),
}


def random_rows(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    row_bytes = ENCODINGS[name].row_bytes(columns)
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


def sane_rows(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes as stored blocks, with scales that are finite and not tiny."""
    raw = random_rows(name, rows, columns, seed)
    rng = np.random.default_rng(seed + 1)
    blocks = raw.reshape(-1, ENCODINGS[name].block_bytes)
    if name == "F32":
        blocks[:] = rng.standard_normal(len(blocks)).astype("<f4").view(np.uint8).reshape(-1, 4)
    elif name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, len(blocks))  # a power of two
    elif name == "IQ1_M":
        scales = blocks[:, 48:].view("<u2")  # the upper nibbles are one f16, lowest first
        half = rng.uniform(0.01, 2, len(blocks)).astype("<f2").view("<u2")
        for i in range(4):
            scales[:, i] = (scales[:, i] & 0x0FFF) | ((half >> (4 * i)) & 15) << 12
    else:
        for at in F16_SCALES.get(name, (0,)):
            numbers = (rng.uniform(0.01, 2, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype("<f2")
            blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return raw


def dequantized(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
