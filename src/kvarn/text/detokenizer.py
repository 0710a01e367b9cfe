"""Text from a stream of tokens.

Contract: the strings that `push` and the final `flush` give, joined, equal `decode` of all the ids. No string ends
within a character: bytes wait until the character is complete. Non-goals: words, stop strings.
"""

import codecs
from collections.abc import Sequence

from kvarn.text.tokenizer import Tokenizer


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, after: Sequence[int] = ()) -> None:
        """`after`: the prompt that the tokens continue. Without it a leading space is taken for SentencePiece's own."""
        self._pieces = tokenizer.pieces(special=special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for id in after[-1:]:
            self._pieces.push(id)

    def push(self, id: int) -> str:
        return self._utf8.decode(self._pieces.push(id))

    def flush(self) -> str:
        """The end: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
