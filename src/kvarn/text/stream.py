"""Text as it is written, token by token, with stop strings.

Nothing is handed out that could still turn out to be the beginning of a stop string, and nothing of one ever is. One
thread may take while another one pushes: what is certain does not change any more.
"""

from collections.abc import Sequence

from kvarn.text.detokenizer import Detokenizer
from kvarn.text.tokenizer import Tokenizer


class TextStream:
    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""  # complete up to the stop string, if there was one
        self._stop = tuple(stop)
        self._detokenizer = Detokenizer(tokenizer, after=prompt)
        self._certain = 0  # characters of the text that nothing takes back; set after the text
        self._taken = 0
        self._closed = False

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string has appeared (the text then ends before it)."""
        return self._add(self._detokenizer.push(token))

    def close(self) -> None:
        """No more tokens will come: what was held back is text."""
        if not self._closed:
            self._add(self._detokenizer.flush())
            self._closed = True
            self._certain = len(self.text)

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return self._certain > self._taken

    def take(self) -> str:
        """What has become certain since the last call."""
        end = self._certain  # before the text is read, which may grow meanwhile
        piece, self._taken = self.text[self._taken : end], end
        return piece

    def _add(self, piece: str) -> bool:
        if self._closed or not piece:
            return False
        longest = max((len(stop) for stop in self._stop), default=0)
        start = max(len(self.text) - longest, 0)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._closed = True
        self._certain = max(self._certain, len(self.text) - (0 if self._closed else self._held()))
        return bool(found)

    def _held(self) -> int:
        """Characters at the end that could begin a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        return next((n for n in range(min(len(stop) - 1, len(self.text)), 0, -1) if self.text.endswith(stop[:n])), 0)
