"""Output: for people, aligned tables and sizes in readable units; for machines, JSON."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any


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


def print_json(value: Any) -> None:
    """A number that is not finite becomes null, because JSON has none."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=not speaks_utf8(), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def speaks_utf8() -> bool:
    """Whether standard output has every letter."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
