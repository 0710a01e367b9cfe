"""Numbers with their nouns or units, that people read and write: "1 token", "1,024 tokens", "398 MB", "2G".

Pure functions over text; nothing of kvarn is imported.
Non-goals: sizes of memory, in binary units (cli/table.py); other languages.
"""

import re
from collections.abc import Sequence

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # all binary: 1 GB and 1 GiB are 1G
_BYTES = re.compile(r"(.+?)(?:([KMG])(?:I?B)?|B)?", re.IGNORECASE)


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`n` with its noun. `plural` is needed where it is not the noun with an s: counted(2, "query", "queries")."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def file_size(n: int) -> str:
    """In decimal units, as download pages and `ls --si` have it: "98 MB", "4.7 GB"."""
    for factor, unit, least in ((1e9, "GB", 999.5e6), (1e6, "MB", 999.5e3), (1e3, "kB", 1000)):
        if n >= least:  # what rounds to a whole unit is given in it
            size = n / factor
            return f"{size:.1f} {unit}" if size < 9.95 else f"{size:.0f} {unit}"
    return counted(n, "byte")


def one_of(words: Sequence[str]) -> str:
    """A choice in words: "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def bytes_of(text: str) -> int | None:
    """A number of bytes that somebody typed: 500M, 2G, 1.5GiB. None if it is no number."""
    number, unit = match.groups() if (match := _BYTES.fullmatch(text)) else ("", None)
    try:
        return int(float(number) * _UNITS[(unit or "").upper()])
    except (ValueError, OverflowError):
        return None
