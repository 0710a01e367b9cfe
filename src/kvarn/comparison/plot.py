"""A comparison as a picture, in SVG: what a cache costs against what it changes, and speed against depth.

    left    memory of one sequence across, 99 % KLD upwards (logarithmic; exactly 0 has its own place):
            good is left and low. A thin line leads down to the mean KLD.
    right   tokens per second against the tokens in the cache: good is high.

The file needs nothing else: no script, no font, no style sheet. It follows a viewer's light or dark
colours. Colours are told apart with all common kinds of colour vision, and every curve has its name.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvarn.comparison.report import Report, Row
from kvarn.comparison.scale import Linear, Logarithmic, apart, linear, logarithmic
from kvarn.comparison.verdict import LEVELS, LOSSLESS, Worst, limit

WIDTH, HEIGHT = 1060, 470
TOP, BOTTOM = 92, 405
LEFT_PANEL, RIGHT_PANEL = (78, 430), (660, 860)  # from x to x; labels need the rest
ZERO = BOTTOM - 18  # where KLD 0 is
GAP = 16  # between labels
LONGEST = 27  # letters of a label
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
STYLE = """
svg { background: var(--paper) }
:root { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --good: #e6f4ea }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --good: #12261e }
}
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
.title { font-size: 15px; font-weight: 600 }
.soft { fill: var(--soft) }
.grid { stroke: var(--line); stroke-width: 1 }
.good { fill: var(--good) }
.leader { stroke-width: 1; stroke-opacity: 0.7; fill: none }
.end { text-anchor: end } .middle { text-anchor: middle }
""".strip()


def plot(report: Report, title: str, subtitle: str) -> str:
    rows = report.rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-labelledby="title summary">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="summary">{escape("; ".join(map(_in_words, rows)))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
        _text(24, 30, title, "title"),
        _text(24, 49, subtitle, "soft"),
        *_quality(rows, report.control),
        *_speed(rows),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
        _text(left, TOP - 16, title),
        _text((left + right) / 2, BOTTOM + 38, "memory of one sequence, MiB", "soft middle"),
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
        parts += [_line(left, y, right, y), _text(left - 8, y + 4, _power(exponent), "soft end")]
    parts += [_line(left, ZERO, right, ZERO), _text(left - 8, ZERO + 4, "exactly 0", "soft end")]
    return parts + _ticks_below(across)


def _ticks_below(across: Linear) -> list[str]:
    parts = [_line(across.low, BOTTOM, across.high, BOTTOM)]
    for value in across.ticks():
        x = across(value)
        parts += [_line(x, BOTTOM, x, BOTTOM + 5), _text(x, BOTTOM + 19, f"{value:,g}", "soft middle")]
    return parts


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 <= exponent <= 2 else f"1e{exponent}"


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
        _text(beside, label + 4, names),
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
        return [_text(left, TOP - 16, "Speed was not measured (-n 0).", "soft")]
    rates = [speed.figure.tok_s for _, row in measured for speed in row.speeds]
    across = Linear(max(1, *(speed.depth for speed in measured[0][1].speeds)), left, right)
    upwards = linear(rates, BOTTOM, TOP)
    parts = [
        _text(left, TOP - 16, "How fast it decodes: tokens/s"),
        _text((left + right) / 2, BOTTOM + 38, "tokens in the cache", "soft middle"),
        *_ticks_below(across),
    ]
    for value in upwards.ticks():
        y = upwards(value)
        parts += [_line(left, y, right, y), _text(left - 8, y + 4, f"{value:,g}", "soft end")]
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
            _text(right + 24, label + 4, row.name),
        ]
    return parts


# -- pieces ----------------------------------------------------------------------------------------------------------


def _hue(i: int) -> str:
    return HUES[i % len(HUES)]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'
