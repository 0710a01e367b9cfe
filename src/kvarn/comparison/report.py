"""The result of a comparison: one row per candidate, the base first."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvarn.bench.subject import Setup
from kvarn.comparison.candidate import Candidate, control_of, name_of
from kvarn.comparison.speed import Speed
from kvarn.comparison.statistics import Statistics, statistics
from kvarn.comparison.verdict import Worst, verdict, worst
from kvarn.engine.scoring import scored_from

BANDS = {"0-1k": (0, 1024), "1-4k": (1024, 4096), "4k+": (4096, inf)}  # tokens before the position, in its window


@dataclass(frozen=True, slots=True)
class Row:
    setup: Setup
    strategy: str  # what `auto` chose
    layout: str
    bytes_per_token: int  # of the cells of one token, in all layers
    nbytes: int  # of one sequence as long as the window of text
    whole: Statistics  # of the second halves of the windows, as llama.cpp has it
    bands: dict[str, Statistics]  # of all positions, by depth; only bands that the windows reach
    equal: int
    positions: int
    twin: str | None  # the first row with equal cells and equal visibility
    equal_to_twin: int
    worst: Worst  # depth bands
    verdict: str  # lossless, noise, safe, close, different
    speeds: Sequence[Speed]

    @property
    def name(self) -> str:
        return name_of(self.setup)


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]  # the base first
    control: Worst


def report(candidates: Sequence[Candidate], positions: int, window: int, found: Sequence[Sequence[Speed]]) -> Report:
    """`window` is the length of the windows of text; `found` has the speeds by candidate."""
    control = control_of(candidates)
    bands = {id(each): _bands(each) for each in candidates}
    least = worst(list(bands[id(control)].values()))
    rows = []
    for each, speeds in zip(candidates, found, strict=True):
        its = bands[id(each)]
        most = worst(list(its.values()))
        word = verdict(each.track, positions, most, least, control.track)
        rows.append(_row(each, positions, window, its, most, word, speeds))
    return Report(tuple(rows), least)


def _bands(each: Candidate) -> dict[str, Statistics]:
    depths = each.track.depth
    reached = {name: limits for name, limits in BANDS.items() if limits[0] <= max(depths)}
    return {
        name: statistics(each.track, [low <= depth < high for depth in depths]) for name, (low, high) in reached.items()
    }


def _row(
    each: Candidate,
    positions: int,
    window: int,
    bands: dict[str, Statistics],
    most: Worst,
    word: str,
    speeds: Sequence[Speed],
) -> Row:
    first = scored_from(window)
    return Row(
        setup=each.setup,
        strategy=each.plan.strategy.name,
        layout=each.plan.layout.name,
        bytes_per_token=each.plan.bytes_per_token,
        nbytes=each.plan.nbytes,
        whole=statistics(each.track, [depth >= first for depth in each.track.depth]),
        bands=bands,
        equal=each.track.equal,
        positions=positions,
        twin=None if each.twin is None else each.twin.name,
        equal_to_twin=each.equal_to_twin,
        worst=most,
        verdict=word,
        speeds=speeds,
    )
