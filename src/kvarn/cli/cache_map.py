"""A small live map of the cache below an answer (`--map`): one character per block, on terminals only.

    cache    6 of 128 blocks, 180 tokens     █ computed  ▒ reused  ░ kept  · free
    ▒▒▒██▃░░░·······································································

A block that is being filled grows in eighths. A cache with more blocks than MOST_ROWS rows hold has several in a
character. The rows are drawn below the cursor, which then returns, in one write, so nothing flickers. Text must not
use the last column of the terminal (`LiveRows` breaks it before), because there a terminal forgets where it was.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarn.cli.chat.live import LiveRows, cells, terminal_size
from kvarn.cli.thinking import dim
from kvarn.jobs.job import Job
from kvarn.llm import LLM
from kvarn.words import counted

if TYPE_CHECKING:
    from kvarn.cache.usage import GroupMap

MOST_ROWS = 4
INTERVAL = 0.1  # seconds between two drawings
CLEAR = "\x1b[J"  # from the cursor on
FREE, KEPT, REUSED, COMPUTED = range(4)
SIGNS, EIGHTHS = "·░▒█", "▁▂▃▄▅▆▇"
ASCII, ASCII_PART = ".-=#", "+"


class Map:
    """The rows. `job`: whose blocks are told apart from those that are only kept."""

    def __init__(self, llm: LLM, job: Job, unicode: bool = True) -> None:
        self._llm = llm
        self._job = job
        self._signs = SIGNS if unicode else ASCII
        self._unicode = unicode

    def rows(self, columns: int) -> list[str]:
        group, request = self._llm.cache.map()[0], self._job.request
        reused = request.adoption.reused if request.adoption else 0
        held = {sample.id: sample.computed for sample in request.samples}
        found: dict[int, tuple[int, float]] = {block: (KEPT, n / group.block_size) for block, n in group.cached}
        for seq, blocks in group.sequences.items():
            length = held.get(seq)
            for block, first in blocks:
                full = 1.0 if length is None else min(max(length - first, 0) / group.block_size, 1.0)
                state = KEPT if length is None else REUSED if first + group.block_size <= reused else COMPUTED
                found[block] = max(found.get(block, (FREE, 0.0)), (state, full))
        return [self._head(group, found, columns), *self._cells(group.n_blocks, found, columns)]

    def _head(self, group: "GroupMap", found: dict[int, tuple[int, float]], columns: int) -> str:
        n_tokens = round(sum(full for _, full in found.values()) * group.block_size)
        words = f"cache    {len(found):,} of {counted(group.n_blocks, 'block')}, {counted(n_tokens, 'token')}"
        names = zip(reversed(self._signs), ("computed", "reused", "kept", "free"), strict=True)
        legend = "  ".join(f"{sign} {name}" for sign, name in names)
        gap = columns - 1 - cells(words) - cells(legend)
        return f"{words}{' ' * min(gap, 5)}{legend}" if gap >= 3 else words[: columns - 1]

    def _cells(self, n_blocks: int, found: dict[int, tuple[int, float]], columns: int) -> list[str]:
        width = max(columns - 1, 1)
        each = -(-n_blocks // (MOST_ROWS * width))  # blocks of a character
        signs = []
        for first in range(0, n_blocks, each):
            here = [found[block] for block in range(first, min(first + each, n_blocks)) if block in found]
            signs.append(self._sign(max(here, default=(FREE, 0.0)), each))
        return ["".join(signs[start : start + width]) for start in range(0, len(signs), width)]

    def _sign(self, block: tuple[int, float], each: int) -> str:
        state, full = block
        if state == COMPUTED and full < 1 and each == 1:
            return EIGHTHS[int(full * 7)] if self._unicode else ASCII_PART
        return self._signs[state]


class Below:
    """Draws the map below the cursor. Methods return what to write to the terminal."""

    def __init__(
        self,
        rows: Callable[[int], list[str]],
        size: Callable[[], os.terminal_size],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self._size = size
        self._clock = clock
        self._drawn: list[str] = []
        self._last = -INTERVAL

    def draw(self) -> str:
        """The rows, or the last ones if they are new enough."""
        size, now = self._size(), self._clock()
        if now - self._last >= INTERVAL:
            self._last, self._drawn = now, self._rows(size.columns)
        n = len(self._drawn)
        if n + 2 > size.lines:
            return ""
        room = "\x1bD" * n + f"\x1b[{n}A"  # scrolls, if the cursor is near the bottom; keeps its column
        return room + "\x1b7" + "".join(f"\r\x1bD{dim(row)}\x1b[K" for row in self._drawn) + "\x1b8"

    def leave(self) -> str:
        """The rows as they are at the end, to stay. The cursor must be at the start of a line."""
        return CLEAR + "".join(f"{dim(row)}\n" for row in self._rows(self._size().columns))


class MappedText:
    """Text with the map below it, for `kvarn run`."""

    def __init__(self, below: Below) -> None:
        self._below = below
        self._live = LiveRows(terminal_size)

    def add(self, text: str) -> None:
        _write(CLEAR + self._live.add(text) + self._below.draw())

    def wait(self) -> None:
        """While the prompt is read, another line may stand at the cursor."""
        _write(self._below.draw())

    def end(self, thought: bool) -> None:
        _write(CLEAR + self._live.leave() + self._below.leave())


def below(llm: LLM, job: Job) -> Below:
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return Below(Map(llm, job, unicode).rows, terminal_size)


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
