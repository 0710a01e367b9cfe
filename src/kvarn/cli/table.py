"""Output for people: aligned tables, and sizes in readable units."""

import sys
from collections.abc import Sequence


def human_bytes(n: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """The first `left` columns to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        aligned = [text.ljust(widths[i]) if i < left else text.rjust(widths[i]) for i, text in enumerate(line)]
        print("  ".join(aligned).rstrip())


def speaks_utf8() -> bool:
    """Whether standard output has every letter."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
