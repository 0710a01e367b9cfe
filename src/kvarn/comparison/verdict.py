"""One word per candidate, from thresholds. The thresholds are kvarn's own; llama.cpp has none.

Kernels round activations. Then a change of a last bit, anywhere, grows until it is as large as that
rounding, whatever caused it. So answers of a quantized model differ from the base by some amount for every
cache that is not lossless. The control, f16 cells, measures this amount: their own rounding is far smaller.
Thresholds count from there. They must hold in every depth band with enough positions, because the error of
stored keys and values grows with depth.
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from kvarn.comparison.divergence import Track
from kvarn.comparison.statistics import Statistics
from kvarn.engine.scoring import mean

ENOUGH = 100  # positions; llama.cpp also gives no statistics of fewer
ERRORS = 2  # standard errors that count as no difference


class Level(NamedTuple):
    """Both must hold."""

    word: str
    kld: float  # the 99 % KLD is below this,
    times: float  # or below so many times that of the control
    same_top: float  # same top p is less than this below that of the control


LEVELS = (Level("safe", 0.02, 2, 0.01), Level("close", 0.1, 5, 0.03))
LOSSLESS, NOISE, DIFFERENT = "lossless", "noise", "different"


class Worst(NamedTuple):
    """Over the depth bands."""

    kld: float  # the largest 99 % KLD
    same_top: float  # the smallest share of equal top tokens


def worst(bands: Sequence[Statistics]) -> Worst:
    enough = [each for each in bands if each.positions >= ENOUGH] or bands
    return Worst(max(each.kld.p99 for each in enough), min(each.same_top.value for each in enough))


def limit(level: Level, control: Worst) -> Worst:
    """What a candidate must stay below and above. A control that overflowed says nothing."""
    if not isfinite(control.kld):
        return Worst(level.kld, 1 - level.same_top)
    return Worst(max(level.kld, level.times * control.kld), control.same_top - level.same_top)


def verdict(track: Track, positions: int, of: Worst, control: Worst, control_track: Track) -> str:
    """`of` and `control` are the worst bands of the candidate and of the control."""
    if track.equal == positions:
        return LOSSLESS
    farther = mean([ours - theirs for ours, theirs in zip(track.kld, control_track.kld, strict=True)])
    if farther.value <= ERRORS * farther.error:
        return NOISE
    for level in LEVELS:
        least = limit(level, control)
        if of.kld < least.kld and of.same_top > least.same_top:
            return level.word
    return DIFFERENT


def thresholds(control: Worst) -> list[str]:
    """What the words mean, one line each."""
    lines = [
        "lossless: every bit of every logit is equal",
        f"noise: mean KLD not above that of f16 cells by more than {ERRORS} standard errors",
    ]
    for level in LEVELS:
        least = limit(level, control)
        lines.append(
            f"{level.word}: 99 % KLD below {least.kld:.3g} and same top p above {100 * least.same_top:.2f} % "
            "in every depth band"
        )
    return [*lines, "different: anything else"]
