"""Pieces of a picture in SVG.

The file needs nothing else: no script, no font, no style sheet. It follows a viewer's light or dark
colours. Colours are told apart with all common kinds of colour vision.
"""

from collections.abc import Iterable
from xml.sax.saxutils import escape

HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
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


def picture(width: int, height: int, title: str, subtitle: str, in_words: str, parts: Iterable[str]) -> str:
    """`in_words`: what the picture shows, for those who do not see it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title summary">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="summary">{escape(in_words)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        text(24, 30, title, "title"),
        text(24, 49, subtitle, "soft"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def power(exponent: int) -> str:
    """Of ten, as the label of a tick."""
    return f"{10.0**exponent:g}" if -4 <= exponent <= 2 else f"1e{exponent}"
