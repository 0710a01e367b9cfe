"""Shows the progress of long work on a terminal."""

import sys
import time
from types import TracebackType


class ProgressLine:
    """One line on standard error, rewritten in place and removed at the end. Without a terminal it shows nothing."""

    def __init__(self) -> None:
        self._shown = 0
        self._last = 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """`what` alone is a whole line; with `total` a share follows it, with `done` alone megabytes."""
        now = time.monotonic()
        if not sys.stderr.isatty() or (done != total and now - self._last < 0.1):
            return
        self._last = now
        line = what
        if total:
            line = f"{what} {100 * done / total:3.0f} %"
        elif done:
            line = f"{what} {done / 1e6:.0f} MB"
        print("\r" + line.ljust(self._shown), end="", file=sys.stderr, flush=True)
        self._shown = len(line)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
            self._shown = 0
