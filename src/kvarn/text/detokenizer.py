"""Text from a stream of tokens.

Contract: the joined results of `push` and of the final `flush` are equal to `decode` of all ids. A
result never ends inside a character: its bytes are held back until it is complete. Non-goals: words,
stop strings.
"""

import codecs
from collections.abc import Container, Sequence

from kvarn.text.tokenizer import Tokenizer


class Detokenizer:
    def __init__(
        self, tokenizer: Tokenizer, *, special: bool = False, shown: Container[int] = (), after: Sequence[int] = ()
    ) -> None:
        """`shown`: control tokens that appear even if not `special`. `after`: the prompt before the tokens. Without it,
        a leading space is removed as SentencePiece's prefix."""
        self._pieces = tokenizer.pieces(special=special, shown=shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for id in after[-1:]:
            self._pieces.push(id)

    def push(self, id: int) -> str:
        return self._utf8.decode(self._pieces.push(id))

    def flush(self) -> str:
        """Call at the end. An incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
