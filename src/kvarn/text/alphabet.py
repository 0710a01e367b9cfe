"""How vocabularies spell bytes: byte-level BPE as one printable character per byte, SentencePiece as U+2581 and <0xXX>.

Contract: from the text of an ordinary token to its bytes. Non-goal: control tokens, which spell themselves.
"""

import re
from functools import cache

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other 68 bytes, in order, take the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


# Cached: a vocabulary is finite, and streams spell the same tokens over and over.
@cache
def byte_level(token: str) -> bytes:
    table = _bytes_of_characters()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()  # added to the vocabulary after training, in plain text


@cache
def sentencepiece(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
