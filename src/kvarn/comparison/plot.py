"""A comparison as a picture, in SVG: what a cache costs against what it changes, and speed against depth.

left    memory of one sequence across, 99 % KLD upwards (logarithmic; exactly 0 has its own place):
        good is left and low. A thin line leads down to the mean KLD.
right   tokens per second against the tokens in the cache: good is high.
"""

from collections.abc import Sequence

from kvarn.comparison.drawing import HUES, line, picture, power, text
from kvarn.comparison.report import Report, Row
from kvarn.comparison.scale import Linear, Logarithmic, apart, linear, logarithmic
from kvarn.comparison.verdict import LEVELS, LOSSLESS, Worst, limit

WIDTH, HEIGHT = 1060, 470
TOP, BOTTOM = 92, 405
LEFT_PANEL, RIGHT_PANEL = (78, 430), (660, 860)  # from x to x; labels need the rest
ZERO = BOTTOM - 18  # where KLD 0 is
GAP = 16  # between labels
LONGEST = 27  # letters of a label
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def plot(report: Report, title: str, subtitle: str) -> str:
    rows = report.rows
    parts = [*_quality(rows, report.control), *_speed(rows)]
    return picture(WIDTH, HEIGHT, title, subtitle, "; ".join(map(_in_words, rows)), parts)


def _in_words(row: Row) -> str:
    return f"{row.name}: {row.nbytes / 2**20:.1f} MiB, 99 % KLD {row.worst.kld:.2g}, {row.verdict}"


# -- left: memory and divergence -------------------------------------------------------------------------------------


def _quality(rows: Sequence[Row], control: Worst) -> list[str]:
    left, right = LEFT_PANEL
    across = linear([row.nbytes / 2**20 for row in rows], left, right)
    values = [value for row in rows for value in (row.worst.kld, row.whole.kld.mean)]
    upwards = logarithmic([*values, limit(LEVELS[0], control).kld], ZERO, ZERO - 22, TOP)
    title = f"What it changes: 99 % KLD in the worst depth band (tick: mean; green: {LEVELS[0].word})"
    parts = [
        text(left, TOP - 16, title),
        text((left + right) / 2, BOTTOM + 38, "memory of one sequence, MiB", "soft middle"),
        *_safe_area(upwards, control),
        *_grid(across, upwards),
    ]
    dots = _grouped(rows, across, upwards)
    labels = apart([y for _, y, _ in dots], GAP, TOP, ZERO)
    for (x, y, members), label in zip(dots, labels, strict=True):
        parts += _dot(x, y, label, members, rows, upwards)
    return parts


def _safe_area(upwards: Logarithmic, control: Worst) -> list[str]:
    left, right = LEFT_PANEL
    edge = upwards(limit(LEVELS[0], control).kld)
    return [f'<rect class="good" x="{left}" y="{edge:.1f}" width="{right - left}" height="{BOTTOM - edge:.1f}"/>']


def _grid(across: Linear, upwards: Logarithmic) -> list[str]:
    left, right = LEFT_PANEL
    parts = []
    for exponent in upwards.ticks():
        y = upwards(10.0**exponent)
        parts += [line(left, y, right, y), text(left - 8, y + 4, power(exponent), "soft end")]
    parts += [line(left, ZERO, right, ZERO), text(left - 8, ZERO + 4, "exactly 0", "soft end")]
    return parts + _ticks_below(across)


def _ticks_below(across: Linear) -> list[str]:
    parts = [line(across.low, BOTTOM, across.high, BOTTOM)]
    for value in across.ticks():
        x = across(value)
        parts += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 19, f"{value:,g}", "soft middle")]
    return parts


def _grouped(rows: Sequence[Row], across: Linear, upwards: Logarithmic) -> list[tuple[float, float, list[int]]]:
    """Rows at the same place share a dot."""
    found: dict[tuple[float, float], list[int]] = {}
    for i, row in enumerate(rows):
        place = (round(across(row.nbytes / 2**20), 1), round(upwards(row.worst.kld), 1))
        found.setdefault(place, []).append(i)
    return sorted(((x, y, members) for (x, y), members in found.items()), reverse=True)  # lines to labels cross less


def _dot(
    x: float, y: float, label: float, members: Sequence[int], rows: Sequence[Row], upwards: Logarithmic
) -> list[str]:
    hue, average = _hue(members[0]), upwards(rows[members[0]].whole.kld.mean)
    beside = LEFT_PANEL[1] + 14
    names = _joined([rows[i].name for i in members])
    parts = []
    if rows[members[0]].verdict != LOSSLESS:
        parts.append(f'<path d="M{x} {y}V{average:.1f}m-4 0h8" stroke="{hue}" stroke-width="1.5" fill="none"/>')
    return [
        *parts,
        f'<path class="leader" stroke="{hue}" d="M{x + 7} {y}L{beside - 4:.1f} {label:.1f}"/>',
        f'<circle cx="{x}" cy="{y}" r="5.5" fill="{hue}"/>',
        text(beside, label + 4, names),
    ]


def _joined(names: Sequence[str]) -> str:
    """As many as fit between the panels."""
    shown = next(n for n in range(len(names), 0, -1) if n == 1 or len(", ".join(names[:n])) <= LONGEST)
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest else "")


# -- right: speed ----------------------------------------------------------------------------------------------------


def _speed(rows: Sequence[Row]) -> list[str]:
    left, right = RIGHT_PANEL
    measured = [(i, row) for i, row in enumerate(rows) if row.speeds]
    if not measured:
        return [text(left, TOP - 16, "Speed was not measured (-n 0).", "soft")]
    rates = [speed.figure.tok_s for _, row in measured for speed in row.speeds]
    across = Linear(max(1, *(speed.depth for speed in measured[0][1].speeds)), left, right)
    upwards = linear(rates, BOTTOM, TOP)
    parts = [
        text(left, TOP - 16, "How fast it decodes: tokens/s"),
        text((left + right) / 2, BOTTOM + 38, "tokens in the cache", "soft middle"),
        *_ticks_below(across),
    ]
    for value in upwards.ticks():
        y = upwards(value)
        parts += [line(left, y, right, y), text(left - 8, y + 4, f"{value:,g}", "soft end")]
    ends = [upwards(row.speeds[-1].figure.tok_s) for _, row in measured]
    labels = apart(ends, GAP, TOP, BOTTOM)
    for (i, row), end, label in zip(measured, ends, labels, strict=True):
        points = [(across(s.depth), upwards(s.figure.tok_s)) for s in row.speeds]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = DASHES[i // len(HUES) % len(DASHES)]
        parts += [
            f'<path d="M{path}" stroke="{_hue(i)}" stroke-width="2" stroke-dasharray="{dash}" fill="none"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_hue(i)}"/>' for x, y in points),
            f'<path class="leader" stroke="{_hue(i)}" d="M{right + 5:.1f} {end:.1f}L{right + 20} {label:.1f}"/>',
            text(right + 24, label + 4, row.name),
        ]
    return parts


def _hue(i: int) -> str:
    return HUES[i % len(HUES)]
