"""The output of `kvarn compare`: tables, one verdict per line, or JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from kvarn.cli.table import backend_words, human_bytes, print_table
from kvarn.comparison.report import Report, Row
from kvarn.comparison.speed import Speed
from kvarn.comparison.statistics import Statistics
from kvarn.comparison.verdict import LEVELS, LOSSLESS, Worst, limit, thresholds
from kvarn.errors import printable
from kvarn.words import counted

DIGITS = {"max": "max", "p99_9": "99.9 %", "p99": "99 %", "p95": "95 %", "p90": "90 %", "p75": "75 %", "median": "50 %"}
DIGITS |= {"p25": "25 %", "p10": "10 %", "p5": "5 %", "p1": "1 %", "p0_1": "0.1 %", "min": "min"}


@dataclass(frozen=True, slots=True)
class Facts:
    model: str
    text: str
    context: int  # tokens of a window
    windows: int
    positions: int
    backend: Mapping[str, str]

    @property
    def headline(self) -> tuple[str, str]:
        read = f"{counted(self.windows, 'window')} of {self.context:,} tokens"
        return printable(f"{self.model} on {self.text}"), f"{read}; base: contiguous f32; {backend_words(self.backend)}"


def show(facts: Facts, report: Report, details: bool) -> None:
    rows = report.rows
    title, subtitle = facts.headline
    scored = counted(rows[0].whole.positions, "prediction") + ", in the second halves of the windows, as in llama.cpp"
    print(f"{title}: {subtitle}\n\n{scored}")
    print_table(*_table(rows), left=2, key=2)
    print(f"\nall {facts.positions:,} positions, by the number of tokens before them")
    print_table(*_by_depth(rows), left=2, key=2)
    if details:
        _show_details(rows)
    print("\nverdicts, from the worst depth band; memory as a share of the base's")
    width = max(len(row.name) for row in rows)
    for row in rows[1:]:
        print(f"{row.name.ljust(width)}  {verdict_line(row, rows[0])}")
    print("\nThe thresholds are kvarn's own:")
    for line in thresholds(report.control):
        print(f"  {line}")


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    depths = [f"tok/s @{speed.depth:,}" for speed in rows[0].speeds]
    header = ["cache", "type", "B/token", "memory", "PPL", "+-", "mean KLD", "+-", "99 % KLD", "max KLD", "same top %"]
    return [*header, "first diff", *depths], [_line(row) for row in rows]


def _line(row: Row) -> list[str]:
    of = row.whole
    return [
        *_names(row),
        f"{row.bytes_per_token:,}",
        human_bytes(row.nbytes),
        *(f"{each:.4f}" for each in of.ppl),
        *map(small, (of.kld.mean, of.kld.error, of.kld.p99, of.kld.max)),
        percent(of.same_top.value),
        first_difference(row.speeds),
        *(f"{speed.figure.tok_s:,.1f}" for speed in row.speeds),
    ]


def _names(row: Row) -> list[str]:
    cache = row.setup.cache if row.setup.cache == row.strategy else f"{row.setup.cache} -> {row.strategy}"
    return [cache if row.setup.window is None else f"{cache} {row.setup.window:,}", row.setup.cache_type]


def _by_depth(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    header = ["cache", "type"]
    for name in rows[0].bands:
        header += [f"{name}: mean KLD", "99 %", "max", "same top %"]
    lines = []
    for row in rows:
        line = _names(row)
        for of in row.bands.values():
            line += [small(of.kld.mean), small(of.kld.p99), small(of.kld.max), percent(of.same_top.value)]
        lines.append(line)
    return header, lines


def _show_details(rows: Sequence[Row]) -> None:
    header = ["cache", "type", "mean", "+-", *DIGITS.values()]
    keys = ("mean", "error", *DIGITS)
    print("\nKLD")
    lines = [[*_names(row), *(small(getattr(row.whole.kld, key)) for key in keys)] for row in rows]
    print_table(header, lines, left=2, key=2)
    print("\ndelta-p, in %")
    lines = [[*_names(row), *(percent(getattr(row.whole.delta_p, key), 3) for key in keys)] for row in rows]
    print_table(header, lines, left=2, key=2)
    print("\nPPL, delta-p and same top p, against the base")
    pair = ("ln(PPL ratio)", "PPL ratio", "PPL difference")
    header = ["cache", "type", *(each for name in pair for each in (name, "+-")), "correlation %"]
    header += ["RMS delta-p %", "+-", "same top %", "+-"]
    lines = []
    for of, names in ((row.whole, _names(row)) for row in rows):
        pairs = [each for mean in (of.ln_ppl_ratio, of.ppl_ratio, of.ppl_difference) for each in mean]
        shares = [*(percent(each, 3) for each in of.delta_p_rms), *map(percent, of.same_top)]
        lines.append([*names, *map(small, pairs), percent(of.ppl_correlation), *shares])
    print_table(header, lines, left=2, key=2)


def verdict_line(row: Row, base: Row) -> str:
    share = f"{100 * row.nbytes / base.nbytes:.0f} % memory"
    if row.verdict == LOSSLESS:
        return f"lossless: equal at {row.equal:,} of {row.positions:,} positions; {share}"
    worst = f"99 % KLD {small(row.worst.kld)}, same top p {percent(row.worst.same_top)} %"
    parts = [f"{row.verdict}: {worst}", share]
    if row.twin is not None:
        parts.append(f"equal to {row.twin} at {row.equal_to_twin:,} of {row.positions:,} positions")
    return "; ".join(parts)


def first_difference(speeds: Sequence[Speed]) -> str:
    """The earliest greedy token that differs from the base, counted from 1, and where: `17 @1,024`."""
    found = [(speed.first_different, speed.depth) for speed in speeds if speed.first_different is not None]
    if not found:
        return "none" if speeds else "-"
    first, depth = min(found)
    return f"{first + 1} @{depth:,}"


def small(value: float) -> str:
    """A number near 0. Only exactly 0 is shown as 0."""
    if value == 0:
        return "0"
    if not isfinite(value):
        return "-" if value != value else "inf"
    return f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.5f}"


def percent(share: float, decimals: int = 2) -> str:
    """100 and 0 only if it is exactly that."""
    if share in (0, 1):
        return f"{100 * share:.0f}"
    text = f"{100 * share:.{decimals}f}"
    if share < 1 and float(text) >= 100:
        return f"{100 - 10.0**-decimals:.{decimals}f}"
    return small(100 * share) if float(text) == 0 else text


def to_json(facts: Facts, report: Report) -> dict[str, Any]:
    return {
        **asdict(facts),
        "predictions": report.rows[0].whole.positions,
        "control": report.control._asdict(),
        "thresholds": [_level_json(level.word, limit(level, report.control)) for level in LEVELS],
        "rows": [_row_json(row) for row in report.rows],
    }


def _level_json(word: str, least: Worst) -> dict[str, Any]:
    return {"verdict": word, "kld_p99_below": least.kld, "same_top_above": least.same_top}


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "cache": row.setup.cache,
        "cache_type": row.setup.cache_type,
        "window": row.setup.window,
        "pinned": row.setup.pinned,
        "strategy": row.strategy,
        "layout": row.layout,
        "bytes_per_token": row.bytes_per_token,
        "cache_bytes": row.nbytes,
        "verdict": row.verdict,
        "worst_band": row.worst._asdict(),
        "equal_positions": row.equal,
        "twin": row.twin,
        "equal_to_twin": row.equal_to_twin if row.twin else None,
        "statistics": _statistics_json(row.whole),
        "depth_bands": [{"band": name, "statistics": _statistics_json(of)} for name, of in row.bands.items()],
        "speed": [_speed_json(speed) for speed in row.speeds],
    }


def _statistics_json(of: Statistics) -> dict[str, Any]:
    return {
        "predictions": of.positions,
        "ppl": of.ppl._asdict(),
        "ppl_base": of.ppl_base._asdict(),
        "ppl_correlation": of.ppl_correlation,
        "ln_ppl_ratio": of.ln_ppl_ratio._asdict(),
        "ppl_ratio": of.ppl_ratio._asdict(),
        "ppl_difference": of.ppl_difference._asdict(),
        "kld": of.kld._asdict(),
        "delta_p": of.delta_p._asdict(),
        "delta_p_rms": of.delta_p_rms._asdict(),
        "same_top": of.same_top._asdict(),
    }


def _speed_json(speed: Speed) -> dict[str, Any]:
    figure = asdict(speed.figure)
    return {"depth": speed.depth, **figure, "generated": speed.generated, "first_different": speed.first_different}
