"""Splits an answer into blocks of Markdown while it arrives: paragraphs, headings, list items, tables, lines of code.

`feed` returns the blocks that are complete; `pending` is the text of the block that is not. A block is complete
when no later text can change it: a paragraph at an empty line, a heading at the end of its line, an item of a
list at the next item, and code line by line. Non-goals: the whole of CommonMark; what a block looks like.
"""

import re
from enum import Enum
from typing import NamedTuple

_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_HEADING = re.compile(r" {0,3}#{1,6}([ \t]|$)")
_RULE = re.compile(r" {0,3}([-*_])([ \t]*\1){2,}[ \t]*$")
_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])([ \t]|$)")
_BEGINS_LIST = re.compile(r" {0,3}([-*+]|1[.)])[ \t]+\S")  # of those, what ends a paragraph
_NESTED_FENCE = re.compile(r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(`{3,}|~{3,})")


class Kind(Enum):
    TEXT = "text"  # a paragraph, heading, table, quote or rule
    ITEM = "item"  # of a list, with all that belongs to it
    FENCE = "fence"  # the line that opens or closes a block of code
    CODE = "code"  # one line of code


class Block(NamedTuple):
    kind: Kind
    text: str  # without the last line end
    gap: bool  # whether an empty line is shown before it
    language: str = ""  # of code


class Splitter:
    def __init__(self) -> None:
        self._lines: list[str] = []  # complete lines of the pending block
        self._line = ""
        self._kind = Kind.TEXT
        self._last: Kind | None = None  # the kind of the last complete block
        self._blank = False  # whether an empty line came after it
        self._fence: tuple[str, str] | None = None  # the open block of code: its marks and language
        self._nested = ""  # marks of an open block of code inside the pending item

    @property
    def pending(self) -> str:
        """The text of the block that is not complete. It only grows until `feed` returns a block."""
        return "\n".join([*self._lines, self._line])

    @property
    def gap(self) -> bool:
        """Whether an empty line is shown before the pending block, as far as known."""
        return self._gap(self._kind if self._lines else Kind.ITEM)

    def feed(self, text: str) -> list[Block]:
        first, *rest = text.split("\n")
        self._line += first
        blocks: list[Block] = []
        for line in rest:
            complete, self._line = self._line, ""
            blocks += self._take(complete)
            self._line = line
        return blocks

    def end(self) -> list[Block]:
        blocks = self.feed("\n") if self._line else []
        return blocks + self._complete()

    # -- one complete line ---------------------------------------------------------------------------------------

    def _take(self, line: str) -> list[Block]:
        if self._fence is not None:
            return [self._code(line)]
        if self._lines and self._belongs(line):
            self._lines.append(line)
            self._watch_nested(line)
            return []
        done = self._complete()
        return done + self._begin(line)

    def _begin(self, line: str) -> list[Block]:
        """The line is the first of a block."""
        if not line.strip():
            self._blank = True
            return []
        opened = _FENCE.match(line)
        if opened:
            block = self._made(Kind.FENCE, line.strip())
            self._fence = (opened[2], opened[3].split(" ")[0].strip())
            return [block]
        is_rule = _RULE.match(line) is not None
        self._kind = Kind.ITEM if _ITEM.match(line) and not is_rule else Kind.TEXT
        self._lines = [line]
        self._watch_nested(line)
        return self._complete() if is_rule or _HEADING.match(line) else []

    def _belongs(self, line: str) -> bool:
        """Whether the line is a part of the pending block."""
        if self._nested:
            return True
        if self._kind is Kind.TEXT:
            ends = not line.strip() or _FENCE.match(line) or _HEADING.match(line) or _BEGINS_LIST.match(line)
            return not ends
        if not line.strip():
            return True
        if line.startswith(("  ", "\t")):
            return True
        after_blank = not self._lines[-1].strip()
        ends = after_blank or _ITEM.match(line) or _FENCE.match(line) or _HEADING.match(line) or _RULE.match(line)
        return not ends

    def _watch_nested(self, line: str) -> None:
        if self._kind is not Kind.ITEM:
            return
        marks = _NESTED_FENCE.match(line)
        if self._nested:
            self._nested = "" if line.strip().startswith(self._nested) else self._nested
        elif marks:
            self._nested = marks[1]

    def _code(self, line: str) -> Block:
        assert self._fence is not None
        marks, language = self._fence
        bare = line.strip()
        if len(bare) >= len(marks) and not bare.strip(marks[0]) and not line.startswith("    "):
            self._fence = None
            return self._made(Kind.FENCE, bare, gap=False)
        return self._made(Kind.CODE, line, gap=False, language=language)

    def _complete(self) -> list[Block]:
        if not self._lines:
            return []
        text, self._lines, self._nested = "\n".join(self._lines), [], ""
        block = self._made(self._kind, text.rstrip("\n"))
        self._blank = text.endswith("\n")  # empty lines at the end of an item
        return [block]

    def _made(self, kind: Kind, text: str, gap: bool | None = None, language: str = "") -> Block:
        block = Block(kind, text, self._gap(kind) if gap is None else gap, language)
        self._last, self._blank = kind, False
        return block

    def _gap(self, kind: Kind) -> bool:
        if self._last is None or self._fence is not None:
            return False
        return self._blank or not (self._last is kind is Kind.ITEM)
