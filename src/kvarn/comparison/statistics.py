"""llama.cpp's statistics of a comparison, by its names: perplexity, KL divergence, delta-p, same top p.

They are what `llama-perplexity --kl-divergence` prints. Sums are exactly rounded (fsum), and differences
are averaged, not averages subtracted, so lossless choices give exactly 0 with an error of exactly 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvarn.arithmetic import exp
from kvarn.comparison.divergence import Track
from kvarn.engine.scoring import Mean, mean

FRACTIONS = {
    "p99_9": 0.999,
    "p99": 0.99,
    "p95": 0.95,
    "p90": 0.9,
    "p75": 0.75,
    "median": 0.5,
    "p25": 0.25,
    "p10": 0.1,
    "p5": 0.05,
    "p1": 0.01,
    "p0_1": 0.001,
}


class Distribution(NamedTuple):
    mean: float
    error: float
    max: float
    p99_9: float
    p99: float
    p95: float
    p90: float
    p75: float
    median: float
    p25: float
    p10: float
    p5: float
    p1: float
    p0_1: float
    min: float


@dataclass(frozen=True, slots=True)
class Statistics:
    positions: int
    ppl: Mean
    ppl_base: Mean
    ppl_correlation: float  # of ln(PPL) and ln(PPL(base))
    ln_ppl_ratio: Mean
    ppl_ratio: Mean
    ppl_difference: Mean
    kld: Distribution
    delta_p: Distribution
    delta_p_rms: Mean
    same_top: Mean


def statistics(track: Track, chosen: Sequence[bool]) -> Statistics:
    """Of the chosen positions, at least one."""
    nll, nll_base = list(compress(track.nll, chosen)), list(compress(track.nll_base, chosen))
    kld, delta_p = list(compress(track.kld, chosen)), list(compress(track.delta_p, chosen))
    log_ppl, log_base = mean(nll), mean(nll_base)
    ppl, base = _exp(log_ppl), _exp(log_base)
    ratio = mean([a - b for a, b in zip(nll, nll_base, strict=True)])
    error = mean([ppl.value * a - base.value * b for a, b in zip(nll, nll_base, strict=True)]).error
    same = mean([float(each) for each in compress(track.same_top, chosen)])
    return Statistics(
        positions=len(nll),
        ppl=ppl,
        ppl_base=base,
        ppl_correlation=_correlation(log_ppl, log_base, ratio),
        ln_ppl_ratio=ratio,
        ppl_ratio=_exp(ratio),
        ppl_difference=Mean(ppl.value - base.value, error),
        kld=distribution(kld),
        delta_p=distribution(delta_p),
        delta_p_rms=_root(mean([d * d for d in delta_p])),
        same_top=same,
    )


def distribution(values: Sequence[float]) -> Distribution:
    ordered = sorted(values)
    average = mean(values)
    return Distribution(
        mean=average.value,
        error=average.error,
        max=ordered[-1],
        min=ordered[0],
        **{name: percentile(ordered, fraction) for name, fraction in FRACTIONS.items()},
    )


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Between the two nearest values, in proportion."""
    place = fraction * (len(ordered) - 1)
    below = int(place)
    share = place - below
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low if low == high or not share else (1 - share) * low + share * high


def _exp(of: Mean) -> Mean:
    value = float(exp(np.array(of.value)))
    return Mean(value, value * of.error)


def _root(of: Mean) -> Mean:
    root = math.sqrt(of.value)
    return Mean(root, 0.5 / root * of.error if root else of.error)


def _correlation(a: Mean, b: Mean, difference: Mean) -> float:
    """From var(a - b) = var(a) + var(b) - 2 cov(a, b). 1 for equal values."""
    if difference.error == 0:
        return 1.0
    product = 2 * a.error * b.error
    if not product > 0:
        return math.nan
    return (a.error * a.error + b.error * b.error - difference.error * difference.error) / product
