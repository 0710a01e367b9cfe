"""Stored weights to float32.

`dequantize` takes the bytes of whole rows and returns their numbers. The `gguf` package dequantizes the
block types, so the bits are its bits. Rows are converted in chunks, because the package makes a second
copy of its input. `grid_of` is for code that reads the bytes itself.
Non-goals: quantizing; multiplying stored weights without widening (backends do this).
"""

from functools import cache
from math import prod

import numpy as np
import numpy.typing as npt

from kvarn.arrays import Bytes, Floats
from kvarn.errors import BadModel
from kvarn.loading.encodings import ENCODINGS

CHUNK = 1 << 20  # numbers widened at a time: temporaries stay near 10 MB, and a call's overhead below a percent

_AGAIN = "fetch the model again"

# F64 and the integers are storage of other things than weights; Q8_1 and Q8_K hold activations.
READABLE = frozenset(ENCODINGS) - {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}


def dequantize(raw: Bytes, type_name: str, shape: tuple[int, ...]) -> Floats:
    """The numbers stored in `raw`, as a new array of this shape."""
    encoding = ENCODINGS.get(type_name)
    if encoding is None or type_name not in READABLE:
        raise BadModel(f"weights of type {type_name} cannot be read; convert the model to F16, Q8_0 or Q4_K")
    if 0 in shape:
        return np.zeros(shape, np.float32)
    columns = shape[-1] if shape else 1
    if columns % encoding.block_size:
        size = encoding.block_size
        raise BadModel(f"rows of {columns} numbers are no whole blocks of {size} ({type_name}); {_AGAIN}")
    n_bytes = prod(shape[:-1]) * encoding.row_bytes(columns)
    if raw.size != n_bytes:
        raise BadModel(f"{raw.size} bytes are no {type_name} tensor of shape {shape}, which takes {n_bytes}; {_AGAIN}")
    rows = raw.reshape(-1, encoding.row_bytes(columns))  # [rows, row_bytes]
    match type_name:
        case "F32":
            out = np.ascontiguousarray(rows).view("<f4").astype(np.float32)
        case "F16":
            out = np.ascontiguousarray(rows).view("<f2").astype(np.float32)
        case "BF16":  # the upper half of a float32
            out = (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            out = _widen_blocks(rows, type_name, columns)
    return out.reshape(shape)


def _widen_blocks(rows: Bytes, type_name: str, columns: int) -> Floats:
    import gguf  # 0.2 s, and only some models need it

    kind = getattr(gguf.GGMLQuantizationType, type_name, None)
    if kind is None:
        raise BadModel(f"the installed gguf package is too old for {type_name} weights: pip install -U gguf")
    out = np.empty((len(rows), columns), np.float32)
    step = max(1, CHUNK // columns)
    # A scale may be infinite or NaN in a damaged file; the numbers say so themselves.
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            try:
                out[start : start + step] = gguf.quants.dequantize(rows[start : start + step], kind)
            except NotImplementedError:
                raise BadModel(
                    f"the installed gguf package cannot read {type_name} weights: pip install -U gguf"
                ) from None
    return out


@cache
def grid_of(type_name: str) -> npt.NDArray[np.int8] | None:
    """The rows of numbers that the codes of an IQ type point into, [rows, columns]; None for a type without."""
    if not type_name.startswith(("IQ1", "IQ2", "IQ3")):
        return None
    import gguf

    kind = getattr(gguf.quants, type_name, None)
    if kind is None:
        raise BadModel(f"the installed gguf package is too old for {type_name} weights: pip install -U gguf")
    kind.init_grid()
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape).astype(np.int8))
