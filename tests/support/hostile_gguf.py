"""GGUF files that are wrong: what is wrong with each, its bytes, and what the refusal must say."""

import struct

import numpy as np
from support.gguf_writer import Tensor, gguf, string, value

F32 = np.arange(12, dtype=np.float32).reshape(3, 4)
ONE = [Tensor.of("t", F32)]
BIG = 2**63
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 0, 0)
HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "not a GGUF file"),
    "magic": (gguf(magic=b"GGML"), "not a GGUF file"),
    "big endian": (gguf(version=3 << 24), "big-endian"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "version 0": (gguf(version=0), "version 0"),
    "only a magic": (b"GGUF", "cut short"),
    "n_keys": (gguf(n_keys=BIG), "header of"),
    "n_tensors": (gguf(n_tensors=BIG), "header of"),
    "a key too many": (gguf([("a", "u8", 1)], ONE, n_keys=2), ""),
    "a tensor too many": (gguf([], ONE, n_tensors=2), ""),
    "key length": (gguf([struct.pack("<Q", BIG) + bytes(90)]), "more than 65535"),
    "key beyond": (gguf([struct.pack("<Q", 60000) + bytes(90)]), "needs 60000 bytes"),
    "text length": (gguf([string("k") + struct.pack("<IQ", 8, BIG) + bytes(90)]), "cut short"),
    "array count": (gguf([string("k") + struct.pack("<IIQ", 9, 10, BIG) + bytes(90)]), "elements needs"),
    "array count that wraps": (gguf([string("k") + struct.pack("<IIQ", 9, 10, 2**61) + bytes(90)]), "elements needs"),
    "strings count": (gguf([string("k") + struct.pack("<IIQ", 9, 8, BIG) + bytes(90)]), "elements needs"),
    "strings beyond": (gguf([string("k") + struct.pack("<IIQQ", 9, 8, 2, BIG) + bytes(90)]), "element 0 of k"),
    "arrays count": (gguf([string("k") + struct.pack("<IIQ", 9, 9, BIG) + bytes(90)]), "elements needs"),
    "nested": (gguf([string("k") + NESTED]), "nests arrays"),
    "value type": (gguf([string("k") + struct.pack("<IQ", 13, 0)]), "unknown type 13"),
    "array type": (gguf([string("k") + struct.pack("<IIQ", 9, 13, 1) + bytes(90)]), "unknown type 13"),
    "bool": (gguf([("k", "bool", 2)]), "neither 0 nor 1"),
    "bools": (gguf([("k", "[bool", [0, 1, 2])]), "neither 0 nor 1"),
    "key twice": (gguf([("k", "u8", 1), ("k", "u8", 1)]), "k occurs twice"),
    "key not UTF-8": (gguf([string(b"\xff") + value("u8", 1)]), "not UTF-8"),
    "text not UTF-8": (gguf([("k", "str", b"a\xffb")]), "k is not UTF-8"),
    "token not UTF-8": (gguf([("k", "[str", ["a", b"\xc3"])]), "element 1 of k is not UTF-8"),
    "surrogate": (gguf([("k", "str", b"\xed\xa0\x80")]), "not UTF-8"),
    "alignment 0": (gguf([("general.alignment", "u32", 0)], ONE), "general.alignment is 0"),
    "alignment 48": (gguf([("general.alignment", "u32", 48)], ONE), "general.alignment is 48"),
    "alignment text": (gguf([("general.alignment", "str", "32")], ONE), "general.alignment is '32'"),
    "alignment bool": (gguf([("general.alignment", "bool", 1)], ONE), "general.alignment is True"),
    "alignment huge": (gguf([("general.alignment", "u32", 2**31)], ONE), "cut short"),
    "tensor twice": (gguf([], ONE * 2), "t occurs twice"),
    "no dims": (gguf([], [Tensor("t", bytes(64), ())]), "0 dimensions"),
    "five dims": (gguf([], [Tensor("t", bytes(64), (1,) * 5)]), "5 dimensions"),
    "dim 0": (gguf([], [Tensor("t", bytes(64), (4, 0))]), "is empty"),
    "dim huge": (gguf([], [Tensor("t", bytes(64), (2**62,))]), "cut short"),
    "dims that wrap to 16": (gguf([], [Tensor("t", bytes(64), (2**32, 2**32, 4))]), "cut short"),
    "dims that wrap to 0": (gguf([], [Tensor("t", bytes(64), (2**63, 2))]), "cut short"),
    "tensor type": (gguf([], [Tensor("t", bytes(64), (4,), type_id=99)]), "unknown type 99"),
    "retired type": (gguf([], [Tensor("t", bytes(64), (4,), type_id=4)]), "unknown type 4"),
    "part of a block": (gguf([], [Tensor("t", bytes(64), (33,), type_id=2)]), "whole blocks of 32"),
    "past the end": (gguf([], [Tensor("t", F32.tobytes(), (4, 4))]), "cut short"),
    "offset past the end": (gguf([], [Tensor("t", F32.tobytes(), (4, 3), offset=2**40)]), "cut short"),
    "offset that wraps": (gguf([], [Tensor("t", F32.tobytes(), (4, 3), offset=2**64 - 32)]), "cut short"),
    "misaligned": (gguf([], [Tensor("t", F32.tobytes(), (4, 3), offset=4)]), "no multiple of 32"),
    "overlap": (gguf([], [Tensor.of("a", F32), Tensor.of("b", F32), Tensor("c", b"", (4,), offset=32)]), "overlap"),
    "same place": (gguf([], [Tensor.of("a", F32), Tensor("b", b"", (4,), offset=0)]), "overlap"),
    "tensor name not UTF-8": (gguf([], [Tensor("é", F32.tobytes(), (4, 3))]).replace("é".encode(), b"\xc3("), "UTF-8"),
    "cut in the data": (gguf([], ONE)[:-1], "cut short"),
    "a line end in a name": (gguf([("a\nb", "u8", 1), ("a\nb", "u8", 1)]), "occurs twice"),
    "a name of 60 KB": (gguf([("k" * 60000, "u8", 1), ("k" * 60000, "u8", 1)]), "occurs twice"),
}
