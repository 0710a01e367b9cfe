"""The characters of an answer, as they come. A reader is a generator that yields when it needs more of them.

What a reader does depends only on the characters and never on how they were cut. Unread characters are those of one
marker at most, so a push costs time in proportion to its own length.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]+")


class Broken(Exception):
    """The call cannot be read."""


class Unmarked(Broken):
    """A call of a strict tool without its marker: no grammar held for it."""


class Source:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.copied = 0  # characters, in all
        self._kept: list[str] = []
        self._from = 0

    def add(self, piece: str) -> None:
        self._kept.append(self.text[self._from : self.at])
        self._from = 0
        self.copied += len(self.text) - self.at + len(piece)
        self.text = self.text[self.at :] + piece
        self.at = 0

    def keep(self) -> None:
        """`kept` begins here."""
        self._kept.clear()
        self._from = self.at

    @property
    def kept(self) -> str:
        return "".join(self._kept) + self.text[self._from : self.at]

    def more(self) -> Steps[bool]:
        """Wait for a character. False: there is none."""
        while self.at >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what matches of the characters that are here."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def spaces(self) -> Steps[str]:
        """Take white space."""
        parts = []
        while (yield from self.more()) and (run := self.run(_SPACES)):
            parts.append(run)
        return "".join(parts)

    def begins(self, markers: Sequence[str]) -> Steps[str]:
        """The marker that comes next, or nothing. Longer markers must come first. Takes nothing."""
        while True:
            for marker in markers:
                here = self.text[self.at : self.at + len(marker)]
                if here == marker:
                    return marker
                if not self.ended and marker.startswith(here):
                    break
            else:
                return ""
            yield

    def take(self, marker: str) -> Steps[bool]:
        """Take the marker if it comes next."""
        if (yield from self.begins((marker,))) != marker:
            return False
        self.at += len(marker)
        return True

    def take_end(self, marker: str) -> Steps[bool]:
        """Take an end marker if it comes next, or what is there of it at the end of the text."""
        if (yield from self.take(marker)):
            return True
        if not self.ended or not marker.startswith(self.text[self.at :]):
            return False
        self.at = len(self.text)
        return True

    def expect(self, marker: str) -> Steps[None]:
        if not (yield from self.take(marker)):
            raise Broken(f"{marker!r} is missing" if (yield from self.more()) else "the text ends inside a call")


def longest_first(*markers: str) -> tuple[str, ...]:
    """Without white space at their ends, without empty ones."""
    return tuple(sorted({m.strip() for m in markers if m.strip()}, key=lambda m: (-len(m), m)))
