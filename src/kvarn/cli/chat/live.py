"""The rows of the screen that show text which is not final, and their removal.

Rows are broken here and not by the terminal, a column before its edge, so their number is known whatever width
the terminal gives to a rare character. Text that is taller than the screen, or that was on the screen when its
size changed, can no longer be removed. It stays as it is. Methods return what to write to the terminal.
"""

import os
import sys
from collections.abc import Callable

from rich.cells import get_character_cell_size

_NARROWEST = 8  # columns: below that, the terminal breaks the rows
_VARIATION_16 = "\N{VARIATION SELECTOR-16}"  # makes some characters wider


class LiveRows:
    def __init__(self, size: Callable[[], os.terminal_size]) -> None:
        self._size = size
        self._row = ""  # the last row
        self._n = 0  # rows on the screen
        self._begun: os.terminal_size | None = None  # the size at the first row
        self._raw = False  # the terminal breaks the rows, so their number is not known

    @property
    def removable(self) -> bool:
        self._notice()
        return not self._raw and (self._begun is None or self._n < self._begun.lines)

    def add(self, text: str) -> str:
        if not text:
            return ""
        size = self._size()
        if self._begun is None:
            self._begun, self._n = size, 1
        self._notice()
        if self._raw:
            self._row = (self._row + text).rsplit("\n", 1)[-1]
            return text
        rows = wrap(self._row + text, size.columns - 1)
        first = rows[0]
        shown = first[len(self._row) :] if first.startswith(self._row) else f"\r{first}\x1b[K"
        self._row = rows[-1]
        self._n += len(rows) - 1
        return shown + "".join(f"\n{row}" for row in rows[1:])

    def remove(self) -> str:
        """Remove all rows. The cursor is then where the first one began."""
        n = self._n
        self.restart()
        return "" if n == 0 else "\r" + (f"\x1b[{n - 1}A" if n > 1 else "") + "\x1b[J"

    def leave(self) -> str:
        """Leave the rows as they are. The cursor is then on a new line."""
        unfinished = bool(self._row)
        self.restart()
        return "\n" if unfinished else ""

    def restart(self) -> None:
        self._row, self._n, self._begun, self._raw = "", 0, None, False

    def _notice(self) -> None:
        if self._begun is not None:
            self._raw |= self._size() != self._begun or self._begun.columns < _NARROWEST


def terminal_size() -> os.terminal_size:
    """The size now. COLUMNS is not used, because it does not change with the window."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns, lines = 0, 0
    return os.terminal_size((columns or 80, lines or 24))


def wrap(text: str, width: int) -> list[str]:
    """The rows of a text, broken at spaces where that is possible."""
    return [row for line in text.expandtabs(4).split("\n") for row in _wrap_line(line, width)]


def _wrap_line(line: str, width: int) -> list[str]:
    rows, row, n = [], "", 0
    blank = 0  # where the last word of the row begins
    for character in line:
        size = 1 if character == _VARIATION_16 else get_character_cell_size(character)
        if character == " " and n > width:
            continue
        if character != " " and n + size > width:  # a space may take the last column
            rows.append(row[:blank] or row)
            row = row[blank:] if blank else ""
            n, blank = cells(row), 0
        row += character
        n += size
        if character == " ":
            blank = len(row)
    return [*rows, row]


def cells(text: str) -> int:
    """Columns that the text takes at most."""
    return sum(1 if c == _VARIATION_16 else get_character_cell_size(c) for c in text)
