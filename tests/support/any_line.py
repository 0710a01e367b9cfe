"""Raises an error at a chosen line of the engine's bookkeeping, as a debugger would stop there."""

import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import kvarn

_ROOT = Path(kvarn.__file__).parent
BOOKKEEPING = tuple(str(_ROOT / part) for part in ("engine/", "cache/", "jobs/runner.py", "jobs/job.py"))


class AnyLine:
    """`run(work, n, error)` raises the error before the n-th line that `work` runs in the bookkeeping."""

    def __init__(self) -> None:
        self.where: str | None = None  # the line; None if `work` had fewer lines

    def run(self, work: Callable[[], object], n: int, error: type[BaseException]) -> object:
        lines = itertools.count()
        self.where = None

        def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
            file = frame.f_code.co_filename
            if not file.startswith(BOOKKEEPING):
                return None
            # Python reports the end of a `with` block as its first line. An error there would skip the block's exit,
            # which no real error can do.
            if event == "line" and not _opens_block(file, frame.f_lineno) and next(lines) == n:
                sys.settrace(None)
                self.where = f"{file.removeprefix(str(_ROOT))}:{frame.f_lineno}"
                raise error("injected")
            return trace

        sys.settrace(trace)
        try:
            return work()
        finally:
            sys.settrace(None)


def _opens_block(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("with ")
