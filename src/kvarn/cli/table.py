"""Output: for people, tables that fit the terminal and sizes in readable units; for machines, JSON.

JSON numbers have the digits that mean something: times of a thousandth of a millisecond, rates with two
decimals, other fractions with six significant digits. Integers and the keys in EXACT are never rounded.
Non-goals: colours; what the fields mean (docs/formats.md, cli/schemas/).
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.cli.safe_text import escaped

GAP = "  "
EXACT = ("when", "logprob")  # they are compared with others, or added up
# Decimals of a key, by its last words. What is inside its value has them, too.
DECIMALS = {
    "ms": 3,
    "ms_per_step": 3,
    "seconds": 3,
    "tok_s": 2,
    "gb_s": 2,
    "per_second": 2,
    "samples": 2,
    "share": 4,
    "spread": 4,
    "ratio": 3,
}
LEAST, MOST = 3, 6  # significant digits: of a key in DECIMALS at the least, of others


def backend_words(facts: Mapping[str, str]) -> str:
    """The facts of a backend in one line: 'cpu, isa amx, order tiles (auto: no NVIDIA device)'."""
    rest = [f"{key} {value}" for key, value in facts.items() if key not in ("name", "chosen")]
    chosen = f" ({facts['chosen']})" if "chosen" in facts else ""
    return ", ".join((facts["name"], *rest)) + chosen


def human_bytes(n: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, key: int = 1) -> None:
    """The first `left` columns to the left, the others to the right.

    A table that is wider than the terminal is printed in several blocks. Each block begins with the first
    `key` columns, which tell the rows apart. If these are too wide, every row takes two lines instead.
    """
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    room = terminal_width()
    whole = sum(widths) + len(GAP) * (len(widths) - 1)
    if room is None or whole <= room:
        _print_columns(header, rows, widths, left, range(len(header)))
        return
    if widths[0] > room // 2:
        _print_folded(header, rows, widths, left)
        return
    fits = sum(widths[:key]) + len(GAP) * key + max(widths[key:]) <= room
    for n, columns in enumerate(_blocks(widths, key if fits else 1, room)):
        if n:
            print()
        _print_columns(header, rows, widths, left, columns)


def terminal_width() -> int | None:
    """Columns of the terminal; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _blocks(widths: Sequence[int], key: int, room: int) -> list[list[int]]:
    """Which columns each block has."""
    first = list(range(key))
    blocks, used = [list(first)], room
    for i in range(key, len(widths)):
        if used + len(GAP) + widths[i] > room and (len(blocks[-1]) > key or i == key):
            blocks, used = [*blocks, list(first)], sum(widths[:key]) + len(GAP) * (key - 1)
        blocks[-1].append(i)
        used += len(GAP) + widths[i]
    return blocks[1:]


def _print_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: int, columns: Sequence[int]
) -> None:
    for line in (header, *rows):
        print(GAP.join(_aligned(line, widths, left, columns)).rstrip())


def _print_folded(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: int) -> None:
    others = range(1, len(header))
    for line in (header, *rows):
        print(line[0])
        print(GAP + GAP.join(_aligned(line, widths, left, others)).rstrip())


def _aligned(line: Sequence[str], widths: Sequence[int], left: int, columns: Sequence[int]) -> list[str]:
    return [line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]) for i in columns]


def print_json(value: Any) -> None:
    """A number that is not finite becomes null, because JSON has none. On a terminal, characters that control it or
    reorder text are escapes."""
    text = json.dumps(tidy(value), indent=2, ensure_ascii=not speaks_utf8(), allow_nan=False)
    print(escaped(text) if sys.stdout.isatty() else text)


def tidy(value: Any, decimals: int | None = None) -> Any:
    """The value with rounded numbers, as JSON output has it."""
    if isinstance(value, Mapping):
        return {key: _tidy_item(key, each, decimals) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(each, decimals) for each in value]
    return _rounded(value, decimals) if isinstance(value, float) else value


def _tidy_item(key: str, value: Any, decimals: int | None) -> Any:
    if key in EXACT and isinstance(value, float):
        return value if math.isfinite(value) else None
    return tidy(value, next((n for end, n in DECIMALS.items() if f"_{key}".endswith(f"_{end}")), decimals))


def _rounded(number: float, decimals: int | None) -> float | None:
    if not math.isfinite(number):
        return None
    if number == 0:
        return 0.0
    before = math.floor(math.log10(abs(number))) + 1  # digits before the point
    wanted = MOST - before if decimals is None else max(decimals, LEAST - before)
    return round(number, max(wanted, 0))


def speaks_utf8() -> bool:
    """Whether standard output has every letter."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
