"""Recognizes lines that change with each request: a time, a date, a counter, a hash, a client's own stamp.

Agents write such lines into their system message. Everything after them is computed again each time.
"""

import re

from kvarn.engine.difference import Kind

LONGEST = 400  # characters of a line; a longer one is cut around the difference
MOST_LINE = 1000  # characters of a line that is remembered
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
_DIGIT, _INITIAL = re.compile(r"\d"), re.compile(r"[MTWFS][a-z]+")  # every pattern has a digit, or is a day
# The first that has the place of the difference inside counts.
PATTERNS = (
    (Kind.DATE, re.compile(rf"(?<!\w)(?:{_DATE})(?![A-SU-Za-z0-9])")),
    (Kind.CLOCK, re.compile(rf"(?<!\d)(?:{_CLOCK})(?!\d)")),
    (Kind.HASH, re.compile(rf"(?<![\w-])(?:{_HEX}|{_RANDOM})(?![\w-])")),
    (Kind.COUNTER, re.compile(r"(?<![\w.])\d++(?![\w.]*[A-Za-z_])")),
)


def line_at(text: str, at: int, first: int = 0, last: int | None = None, most: int = LONGEST) -> tuple[str, int]:
    """The line around a character of the text, and where the character is in it. Only what is from `first` to `last`
    counts."""
    begin = max(text.rfind("\n", first, at) + 1, first, at - most // 2)
    limit = min(at + most // 2, len(text) if last is None else last)
    end = text.find("\n", at, limit)
    return text[begin : end if end >= 0 else limit], at - begin


def kind_of(line: str, first: int, last: int) -> Kind | None:
    """What the difference between this line and an earlier one looks like. It is somewhere from `first` to `last`."""
    if line.startswith(STAMP):
        return Kind.CLIENT_STAMP
    for kind, pattern in PATTERNS:
        for found in pattern.finditer(line):
            if found.start() <= last and first <= found.end():
                return kind
    return None


def masked(line: str) -> str | None:
    """The line without its times, dates, numbers and ids. None if it has none, or is too long."""
    if len(line) > MOST_LINE or not (_DIGIT.search(line) or _INITIAL.search(line)):
        return None
    new = line
    for _, pattern in PATTERNS:
        new = pattern.sub("\0", new)
    return None if new == line else new
