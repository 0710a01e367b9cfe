"""A model's reasoning on a terminal: dim, before the answer. Elsewhere it is not shown, so that a pipe gets the answer
alone."""

from collections.abc import Callable

from kvarn.cli.safe_text import safe


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if text else ""


class Thinking:
    """Reasoning as plain text, with an empty line between it and the answer. `write` prints at once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._open = False

    def add(self, piece: str) -> None:
        self._open = True
        self._write(dim(safe(piece)))

    def end(self, last: bool = False) -> bool:
        """The answer follows, or nothing if this is the `last`. Whether there was reasoning just before."""
        was_open, self._open = self._open, False
        if was_open:
            self._write("\n" if last else "\n\n")
        return was_open
