"""How a tensor's numbers may be stored: names, block sizes and the ids that GGUF gives them.

A row is a whole number of blocks. A block of `block_size` numbers takes `block_bytes` bytes. Only this
table has the sizes. The module imports no large package, so reading the header of a file is fast.
Non-goals: what the bytes mean (quants.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Encoding:
    name: str
    block_size: int  # numbers
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; the columns must be whole blocks."""
        assert columns % self.block_size == 0, (self.name, columns)
        return columns // self.block_size * self.block_bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, in NumPy's order: (rows, columns)."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


# The gaps are ids that were used once and given up, or belong to types that exist only while a program runs.
BY_ID: dict[int, Encoding] = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    9: Encoding("Q8_1", 32, 40),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    15: Encoding("Q8_K", 256, 292),
    16: Encoding("IQ2_XXS", 256, 66),
    17: Encoding("IQ2_XS", 256, 74),
    18: Encoding("IQ3_XXS", 256, 98),
    19: Encoding("IQ1_S", 256, 50),
    20: Encoding("IQ4_NL", 32, 18),
    21: Encoding("IQ3_S", 256, 110),
    22: Encoding("IQ2_S", 256, 82),
    23: Encoding("IQ4_XS", 256, 136),
    24: Encoding("I8", 1, 1),
    25: Encoding("I16", 1, 2),
    26: Encoding("I32", 1, 4),
    27: Encoding("I64", 1, 8),
    28: Encoding("F64", 1, 8),
    29: Encoding("IQ1_M", 256, 56),
    30: Encoding("BF16", 1, 2),
    34: Encoding("TQ1_0", 256, 54),
    35: Encoding("TQ2_0", 256, 66),
    39: Encoding("MXFP4", 32, 17),
}
ENCODINGS: dict[str, Encoding] = {e.name: e for e in BY_ID.values()}
