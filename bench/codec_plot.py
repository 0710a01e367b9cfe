"""The table of codecs as a picture: bits per number across, KLD upwards, one panel per model. Good is left and low."""

import math
from collections.abc import Sequence
from typing import Any

from kvarn.comparison.drawing import HUES, line, picture, power, text
from kvarn.comparison.scale import Logarithmic, logarithmic

WIDTH, HEIGHT = 1060, 470
TOP, BOTTOM = 112, 416
LEFT, PANEL, BETWEEN = 70, 292, 36  # the first panel's x, the width of one, the room between two
FEWEST, MOST = 3.7, 18.0  # bits at the edges
BITS = (4, 5, 6, 8, 16)
LEFT_OUT = (("kvarn", "f16"), ("llama.cpp", "bf16"))  # what they lose is below what the others do
NAMES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2 135M, heads of 64",
    "gemma-3-270m-q4_k_m.gguf": "Gemma 3 270M, heads of 256",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Qwen2.5 Coder 1.5B, heads of 128",
}
KVARN, LLAMA = HUES[0], HUES[1]
Row = dict[str, Any]


def plot(rows: Sequence[Row]) -> str:
    models = [model for model in NAMES if any(row["model"] == model for row in rows)]
    shown = [row for row in rows if (row["engine"], row["type"]) not in LEFT_OUT]
    upwards = logarithmic([row["kld"] for row in shown], BOTTOM, BOTTOM - 8, TOP)
    parts = _legend()
    for number, model in enumerate(models):
        own = [row for row in shown if row["model"] == model]
        parts += _panel(LEFT + number * (PANEL + BETWEEN), NAMES[model], own, upwards, number == 0)
    words = "; ".join(map(_in_words, shown))
    title = "What a codec loses: bits per stored number against KL divergence"
    subtitle = "Good is left and low. WikiText-2, windows of 512 tokens; mean KLD, in nats, from cells of 16 or 32 bits"
    return picture(WIDTH, HEIGHT, title, subtitle, words, parts)


def _in_words(row: Row) -> str:
    return f"{row['model']}, {row['engine']} {row['type']}: {row['bits']} bits, KLD {row['kld']:.2g}"


def _across(left: float, bits: float) -> float:
    return left + PANEL * math.log(bits / FEWEST) / math.log(MOST / FEWEST)


def _legend() -> list[str]:
    y = 71
    return [
        _circle(LEFT + 6, y - 4, KVARN),
        text(LEFT + 18, y, "kvarn (reference backend)"),
        _square(LEFT + 206, y - 4),
        text(LEFT + 218, y, "llama.cpp, which rotates, too"),
    ]


def _panel(left: float, model: str, rows: Sequence[Row], upwards: Logarithmic, labelled: bool) -> list[str]:
    right = left + PANEL
    parts = [text(left, TOP - 10, model)]
    for exponent in upwards.ticks():
        y = upwards(10.0**exponent)
        parts.append(line(left, y, right, y))
        if labelled:
            parts.append(text(left - 8, y + 4, power(exponent), "soft end"))
    for bits in BITS:
        x = _across(left, bits)
        parts += [line(x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 19, f"{bits}", "soft middle")]
    parts += [
        line(left, BOTTOM, right, BOTTOM),
        text((left + right) / 2, BOTTOM + 38, "bits per number", "soft middle"),
    ]
    for engine, hue, dash in (("llama.cpp", LLAMA, "5 4"), ("kvarn", KVARN, "")):
        own = sorted((row for row in rows if row["engine"] == engine), key=lambda row: (row["bits"], row["kld"]))
        best = [row for i, row in enumerate(own) if all(row["kld"] < other["kld"] for other in own[:i])]
        path = "L".join(f"{_across(left, row['bits']):.1f} {upwards(row['kld']):.1f}" for row in best)
        if path:
            parts.append(f'<path d="M{path}" stroke="{hue}" stroke-width="2" stroke-dasharray="{dash}" fill="none"/>')
        for row in own:
            x, y = _across(left, row["bits"]), upwards(row["kld"])
            others = [other for other in rows if other["engine"] != engine and abs(other["bits"] - row["bits"]) < 1]
            below = row in best if engine == "kvarn" else any(row["kld"] < other["kld"] for other in others)
            parts.append(_circle(x, y, hue) if engine == "kvarn" else _square(x, y))
            parts.append(text(x - 7, y + 17, row["type"], "end") if below else text(x + 9, y - 5, row["type"]))
    return parts


def _circle(x: float, y: float, hue: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{hue}"/>'


def _square(x: float, y: float) -> str:
    place = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
    return f'<rect {place} fill="var(--paper)" stroke="{LLAMA}" stroke-width="2"/>'
