"""The result of a comparison: one row per candidate, the base first."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvarn.bench.subject import Setup
from kvarn.comparison.candidate import Candidate, name_of
from kvarn.comparison.speed import Speed
from kvarn.comparison.statistics import Statistics, statistics
from kvarn.comparison.verdict import Verdict, verdict
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
    verdict: Verdict
    speeds: Sequence[Speed]

    @property
    def name(self) -> str:
        return name_of(self.setup)


def row_of(each: Candidate, positions: int, window: int, speeds: Sequence[Speed]) -> Row:
    depths = each.track.depth
    reached = {name: (low, high) for name, (low, high) in BANDS.items() if low < max(depths) + 1}
    bands = {
        name: statistics(each.track, [low <= depth < high for depth in depths]) for name, (low, high) in reached.items()
    }
    first = scored_from(window)
    return Row(
        setup=each.setup,
        strategy=each.plan.strategy.name,
        layout=each.plan.layout.name,
        bytes_per_token=each.plan.bytes_per_token,
        nbytes=each.plan.nbytes,
        whole=statistics(each.track, [depth >= first for depth in depths]),
        bands=bands,
        equal=each.track.equal,
        positions=positions,
        twin=None if each.twin is None else each.twin.name,
        equal_to_twin=each.equal_to_twin,
        verdict=verdict(each.track.equal, positions, list(bands.values())),
        speeds=speeds,
    )
