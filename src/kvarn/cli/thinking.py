"""A model's reasoning on a terminal: dim, before the answer. Elsewhere it is not shown, so that a pipe gets the answer
alone."""

import os
import sys

from kvarn.cli.safe_text import safe


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if text else ""


class Thinking:
    """Writes reasoning to standard output, as plain text. An empty line separates it from what follows."""

    def __init__(self) -> None:
        self._shows = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._open = False

    def add(self, piece: str) -> None:
        if self._shows:
            self._open = True
            _write(dim(safe(piece)))

    def end(self, last: bool = False) -> bool:
        """The answer follows, or nothing if this is the `last`. Whether there was reasoning just before."""
        was_open, self._open = self._open, False
        if was_open:
            _write("\n" if last else "\n\n")
        return was_open


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
