"""The bytes of each token, as they appear in the text.

Contract: this is the inverse of encoding. The space that encoding puts before a text is removed. Control
tokens appear only if `special`, or if they are `shown`. Non-goal: whole characters, which can span several
tokens (detokenizer.py).
"""

from collections.abc import Container

from kvarn.text.vocabulary import Vocabulary


class TokenBytes:
    def __init__(self, vocabulary: Vocabulary, special: bool, shown: Container[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._shown = vocabulary.control if special else shown
        self._at_start = vocabulary.space_prefix != "never"

    def push(self, id: int) -> bytes:
        raw = self._vocabulary.bytes_of(id)
        control = id in self._vocabulary.control
        if control or id in self._vocabulary.plain:
            if self._vocabulary.space_prefix == "always":
                self._at_start = True
            elif not control:
                self._at_start = False
            return b"" if control and id not in self._shown else raw
        if self._at_start and raw:
            self._at_start = False
            return raw.removeprefix(b" ")
        return raw
