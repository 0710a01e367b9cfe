"""One word per candidate, from thresholds. The thresholds are kvarn's own; llama.cpp has none.

The error of stored keys and values grows with depth, so a threshold must hold in every depth band with
enough positions, and not only on average.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvarn.comparison.statistics import Statistics

ENOUGH = 100  # positions; llama.cpp also gives no statistics of fewer


class Level(NamedTuple):
    word: str
    kld: float  # the 99 % KLD is below this
    same_top: float  # the share of equal top tokens is above this
    meaning: str


LEVELS = (
    Level("safe", 0.02, 0.99, "hardly any answer changes"),
    Level("close", 0.1, 0.97, "some answers change in details"),
)
LOSSLESS, DIFFERENT = "lossless", "different"


class Verdict(NamedTuple):
    word: str  # lossless, safe, close, different
    kld: float  # the largest 99 % KLD of a depth band
    same_top: float  # the smallest share of equal top tokens of a depth band


def verdict(equal: int, positions: int, bands: Sequence[Statistics]) -> Verdict:
    """`equal` of `positions` have the bits of the base."""
    enough = [each for each in bands if each.positions >= ENOUGH] or bands
    kld, same_top = max(each.kld.p99 for each in enough), min(each.same_top.value for each in enough)
    if equal == positions:
        return Verdict(LOSSLESS, kld, same_top)
    word = next((level.word for level in LEVELS if kld < level.kld and same_top > level.same_top), DIFFERENT)
    return Verdict(word, kld, same_top)


def thresholds() -> str:
    """What the words mean, in one paragraph."""
    levels = "; ".join(
        f"{level.word}: 99 % KLD below {level.kld} and same top p above {100 * level.same_top:.0f} % in every depth band"
        for level in LEVELS
    )
    return f"lossless: every bit is equal; {levels}; different: neither. The thresholds are kvarn's own."
