"""The bytes of an ordinary token, from its text in the vocabulary.

Byte-level BPE writes one printable character per byte. SentencePiece writes U+2581 for a space and
<0xXX> for a byte. Non-goal: control tokens, whose text is written as it is.
"""

import re
from functools import cache

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves. The other 68 bytes are U+0100 and later, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


# Cached, because streams decode the same tokens many times.
@cache
def byte_level(token: str) -> bytes:
    table = _bytes_of_characters()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()  # a token that was added after training, in plain text


@cache
def sentencepiece(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
