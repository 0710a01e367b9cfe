"""The picture of a comparison: well-formed, complete, and nothing in it is executed."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from kvarn.bench.case import Figure
from kvarn.bench.subject import Setup
from kvarn.comparison.divergence import Track
from kvarn.comparison.plot import HEIGHT, WIDTH, plot
from kvarn.comparison.report import Report, Row
from kvarn.comparison.scale import Linear, apart, linear, logarithmic, round_step
from kvarn.comparison.speed import Speed
from kvarn.comparison.statistics import statistics
from kvarn.comparison.verdict import Worst

SVG = "{http://www.w3.org/2000/svg}"


def row(cache: str, cache_type: str, nbytes: int, kld: float, rates: tuple[float, ...] = (30, 20, 10)) -> Row:
    track = Track(list(range(4)), [1.0] * 4, [1.0] * 4, [kld] * 4, [0.0] * 4, [True] * 4)
    of = statistics(track, [True] * 4)
    speeds = [Speed(1000 * i, Figure(rate, 0.0, (rate,)), 8, None) for i, rate in enumerate(rates)]
    verdict = "lossless" if kld == 0 else "safe"
    setup = Setup(cache, cache_type)
    return Row(
        setup, cache, "columns", 10, nbytes, of, {"0-1k": of}, 0, 4, None, 0, Worst(kld, 1.0), verdict, tuple(speeds)
    )


ROWS = (
    row("contiguous", "f32", 64 << 20, 0.0),
    row("paged", "f32", 64 << 20, 0.0),
    row("paged", "bf16", 32 << 20, 1e-4),
    row("paged", "int8", 17 << 20, 0.004),
)
CONTROL = Worst(1e-4, 1.0)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_row_is_named_on_both_sides() -> None:
    found = texts(plot(Report(ROWS, CONTROL), "title", "subtitle"))
    assert "contiguous f32, paged f32" in found, "rows at the same place share a dot"
    for each in ROWS[2:]:
        assert found.count(each.name) == 2
    for each in ROWS[:2]:
        assert found.count(each.name) == 1


def test_hostile_names_are_text_and_the_file_has_no_script() -> None:
    title = '<script>alert(1)</script>&"]]>'
    svg = plot(Report(ROWS, CONTROL), title, title)
    assert title in texts(svg)
    tags = {each.tag.removeprefix(SVG) for each in ElementTree.fromstring(svg).iter()}
    assert tags == {"svg", "title", "desc", "style", "rect", "text", "path", "circle"}
    assert "prefers-color-scheme: dark" in svg


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ROWS[:1],
        tuple(replace(each, speeds=()) for each in ROWS),
        tuple(replace(each, speeds=each.speeds[:1]) for each in ROWS),
        (ROWS[0], row("paged", "f16", 32 << 20, math.inf)),
        tuple(row("sinks", f"t{i}", i << 20, 10.0 ** -(i % 9)) for i in range(1, 30)),
    ],
    ids=["usual", "base alone", "no speed", "one depth", "overflow", "many"],
)
def test_everything_is_inside_of_the_picture(rows: tuple[Row, ...]) -> None:
    root = ElementTree.fromstring(plot(Report(rows, CONTROL), "t", "s"))
    for tag, x, y in (("text", "x", "y"), ("circle", "cx", "cy"), ("rect", "x", "y")):
        for each in root.iter(f"{SVG}{tag}"):
            assert 0 <= float(each.get(x, "0")) <= WIDTH
            assert -1000 * (len(rows) > 20) <= float(each.get(y, "0")) <= HEIGHT
    assert "nan" not in ElementTree.tostring(root, "unicode").replace("contiguous", "")


def test_labels_are_apart_in_order_and_near_their_places() -> None:
    placed = apart([10.0, 11.0, 50.0, 12.0], 5, 0, 60)
    assert placed == [10.0, 15.0, 50.0, 20.0]
    assert apart([58.0, 60.0], 5, 0, 60) == [55.0, 60.0]
    assert apart([], 5, 0, 60) == []


def test_scales() -> None:
    across = linear([45.0], 0, 100)
    assert (across.top, across.ticks(), across(25.0)) == (50.0, [0, 10, 20, 30, 40, 50], 50.0)
    assert Linear(1014, 0, 100).ticks() == [0, 500, 1000]
    upwards = logarithmic([0.0, 0.003, 0.2, math.inf], 0, 10, 110)
    assert (upwards.ticks(), upwards(0.0), upwards(0.1)) == ([-3, -2, -1, 0], 0, pytest.approx(10 + 200 / 3))
    assert upwards(math.inf) == 110
    assert [round_step(x) for x in (0.3, 1, 1.1, 4, 70)] == [0.5, 1, 2, 5, 100]
