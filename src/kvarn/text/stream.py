"""The text of an answer, token by token, with stop strings.

`take` never returns a part of a stop string. It holds back text that could still be the beginning of
one. One thread may take while another thread pushes, because text that `take` may return never changes.
"""

from collections.abc import Container, Sequence

from kvarn.text.detokenizer import Detokenizer
from kvarn.text.tokenizer import Tokenizer


class TextStream:
    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), shown: Container[int] = ()
    ) -> None:
        """`shown`: control tokens that are part of the text."""
        self.text = ""  # ends before the stop string, if there was one
        self.ends: list[int] = []  # how long the text was after each token
        self.stopped_by: str | None = None  # the stop string
        self._stop = tuple(stop)
        self._detokenizer = Detokenizer(tokenizer, shown=shown, after=prompt)
        self._certain = 0  # characters that can no longer change; set after the text
        self._taken = 0
        self._closed = False

    def push(self, token: int) -> bool:
        """Add a token. True if the text has reached a stop string; it then ends before the stop string."""
        stopped = self._add(self._detokenizer.push(token))
        self.ends.append(len(self.text))
        return stopped

    def close(self) -> None:
        """There are no more tokens, so the text that was held back is certain."""
        if not self._closed:
            self._add(self._detokenizer.flush())
            self._closed = True
            self._certain = len(self.text)

    @property
    def ready(self) -> bool:
        """Whether `take` would return text."""
        return self._certain > self._taken

    def take(self) -> str:
        """The text that has become certain since the last call."""
        end = self._certain  # read before the text, which may grow at the same time
        piece, self._taken = self.text[self._taken : end], end
        return piece

    def _add(self, piece: str) -> bool:
        if self._closed or not piece:
            return False
        longest = max((len(stop) for stop in self._stop), default=0)
        start = max(len(self.text) - longest, 0)
        self.text += piece
        stops = [(at, stop) for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if stops:
            at, self.stopped_by = min(stops)
            self.text = self.text[:at]
            self._closed = True
        self._certain = max(self._certain, len(self.text) - (0 if self._closed else self._held()))
        return bool(stops)

    def _held(self) -> int:
        """Number of characters at the end of the text that could begin a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        return next((n for n in range(min(len(stop) - 1, len(self.text)), 0, -1) if self.text.endswith(stop[:n])), 0)
