"""Shows the progress of long work on a terminal."""

import os
import sys
import time
from types import TracebackType
from unicodedata import east_asian_width

from kvarn.errors import printable

_ERASE = "\r\x1b[2K"  # the whole line, whatever its length
_BYTES = 1_000_000  # a total of a million and more is one of bytes: there are fewer tensors, tokens and cases


class ProgressLine:
    """One line on standard error, rewritten in place and removed at the end. Without a terminal it shows nothing."""

    def __init__(self) -> None:
        self._shown = False
        self._last = 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """`what` alone is a whole line; bytes follow it as `61 of 98 MB`, other amounts as a share."""
        now = time.monotonic()
        if not _on_terminal() or (done != total and now - self._last < 0.1):
            return
        self._last = now
        line = _cut(printable(what), amount(done, total))
        print(_ERASE + line, end="", file=sys.stderr, flush=True)
        self._shown = True

    def say(self, text: str) -> None:
        """A line that stays, also without a terminal."""
        self.erase()
        print(printable(text), file=sys.stderr, flush=True)

    def erase(self) -> None:
        if self._shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)
            self._shown = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.erase()


def amount(done: int, total: int | None) -> str:
    if total is not None and total >= _BYTES:
        return f" {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if total:
        return f" {100 * done / total:3.0f} %"
    return f" {done / 1e6:.0f} MB" if done else ""


def _on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"  # which has no code to erase a line


def _cut(what: str, after: str) -> str:
    """Both in one line of the terminal: the amount in full, and as much of `what` as there is room for."""
    room = _columns() - 1 - len(after)
    for n, sign in enumerate(what):
        room -= 2 if east_asian_width(sign) in "WF" else 1
        if room < 0:
            return what[:n] + after
    return what + after


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):  # no terminal after all: a test, a notebook
        return 80
