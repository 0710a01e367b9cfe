"""Recognizes lines that change with each request: a time, a date, a counter, a hash, a client's own stamp.

Agents write such lines into their system message. Everything after them is computed again each time.
"""

import re

from kvarn.engine.difference import Kind

LONGEST = 400  # characters of a line; a longer one is cut around the difference
STAMP = "x-anthropic-billing-header:"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_DATE = (
    rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}"
    rf"|(?:(?:{_DAY}),?\s+)?(?:\d{{1,2}}\.?\s+{_MONTH}|{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?)(?:,?\s+\d{{4}})?|{_DAY}"
)
_HEX = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?=[a-fA-F]*\d)(?=\d*[a-fA-F])[0-9a-fA-F]{5,}"
_RANDOM = r"(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{12,}"
# The first that has the place of the difference inside counts.
PATTERNS = (
    (Kind.DATE, re.compile(rf"(?<!\w)(?:{_DATE})(?![A-Za-z])")),
    (Kind.CLOCK, re.compile(rf"(?<!\d)(?:{_CLOCK})(?!\d)")),
    (Kind.HASH, re.compile(rf"(?<![\w-])(?:{_HEX}|{_RANDOM})(?![\w-])")),
    (Kind.COUNTER, re.compile(r"(?<![\w.])\d+(?![\w.]*[A-Za-z_])")),
)


def line_at(text: str, at: int, first: int = 0, last: int | None = None) -> tuple[str, int]:
    """The line around a character of the text, and where the character is in it. Only what is from `first` to `last`
    counts."""
    begin = max(text.rfind("\n", first, at) + 1, first, at - LONGEST // 2)
    most = min(at + LONGEST // 2, len(text) if last is None else last)
    end = text.find("\n", at, most)
    return text[begin : end if end >= 0 else most], at - begin


def kind_of(ours: tuple[str, int], theirs: tuple[str, int] | None) -> Kind | None:
    """What the difference between two lines looks like. `theirs`: None if it must not be used. Each with the place of
    the difference. The kinds of a date and its clock count as one."""
    if ours[0].startswith(STAMP):
        return Kind.CLIENT_STAMP
    kind = _kind(*ours)
    if kind is None or theirs is None:
        return kind
    other = _kind(*theirs)
    numbers = {Kind.COUNTER, Kind.HASH}  # a hash may be digits only
    return kind if kind is other else Kind.HASH if {kind, other} == numbers else None


def _kind(line: str, at: int) -> Kind | None:
    for kind, pattern in PATTERNS:
        for found in pattern.finditer(line):
            if found.start() <= at <= found.end():
                return kind
    return None
