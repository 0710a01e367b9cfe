"""Every statistic of `kvarn compare` against its plain definition, computed with 50 digits."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest

from kvarn.arrays import Floats
from kvarn.comparison.divergence import Base, Track, equal_rows
from kvarn.comparison.statistics import Distribution, Statistics, distribution, percentile, statistics
from kvarn.errors import BadLogits

getcontext().prec = 50
VOCABULARY, ROWS = 7, 24


def logits(seed: int, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((ROWS, VOCABULARY)) * scale).astype(np.float32)


def near(seed: int, distance: float) -> Floats:
    """Logits near those of seed 1."""
    return (logits(1) + logits(seed) * distance).astype(np.float32)


TARGETS = [(3 * i) % VOCABULARY for i in range(ROWS)]


def track_of(base: Floats, other: Floats, targets: list[int] = TARGETS) -> Track:
    track = Track()
    track.add(Base(base, targets), 0, other)
    return track


def all_of(track: Track) -> Statistics:
    return statistics(track, [True] * len(track.nll))


# -- the definitions of llama.cpp's tools/perplexity, written down in decimals ---------------------------------------


def log_probabilities(row: Floats) -> list[Decimal]:
    exact = [Decimal(float(x)) for x in row]
    total = sum(x.exp() for x in exact).ln()
    return [x - total for x in exact]


class Plain:
    def __init__(self, base: Floats, other: Floats) -> None:
        ours, theirs = [log_probabilities(row) for row in other], [log_probabilities(row) for row in base]
        pairs = list(zip(ours, theirs, TARGETS, strict=True))
        self.nll = [-q[t] for q, _, t in pairs]
        self.nll_base = [-p[t] for _, p, t in pairs]
        self.kld = [sum(b.exp() * (b - a) for a, b in zip(q, p, strict=True)) for q, p, _ in pairs]
        self.delta_p = [q[t].exp() - p[t].exp() for q, p, t in pairs]
        self.same_top = [Decimal(q.index(max(q)) == p.index(max(p))) for q, p, _ in pairs]


def mean_and_uncertainty(values: list[Decimal]) -> tuple[Decimal, Decimal]:
    n = len(values)
    mean = sum(values) / n
    return mean, ((sum(v * v for v in values) / n - mean * mean) / (n - 1)).sqrt()


def covariance(a: list[Decimal], b: list[Decimal]) -> Decimal:
    n = len(a)
    return (sum(x * y for x, y in zip(a, b, strict=True)) / n - (sum(a) / n) * (sum(b) / n)) / (n - 1)


def between(values: list[Decimal], fraction: str) -> Decimal:
    place = Decimal(fraction) * (len(values) - 1)
    below, ordered = int(place), sorted(values)
    share = place - below
    return (1 - share) * ordered[below] + share * ordered[min(below + 1, len(ordered) - 1)]


def close(ours: float, plain: Decimal) -> bool:
    return math.isclose(ours, float(plain), rel_tol=1e-10, abs_tol=1e-14)


@pytest.fixture(scope="module", params=[0.3, 0.01, 0.00001])
def both(request: pytest.FixtureRequest) -> tuple[Statistics, Plain]:
    base, other = logits(1), near(2, request.param)
    return all_of(track_of(base, other)), Plain(base, other)


def test_perplexity_and_its_ratio(both: tuple[Statistics, Plain]) -> None:
    ours, plain = both
    (log_ppl, error), (log_base, base_error) = map(mean_and_uncertainty, (plain.nll, plain.nll_base))
    shared = covariance(plain.nll, plain.nll_base)
    ppl, base = log_ppl.exp(), log_base.exp()
    ratio_error = (error * error + base_error * base_error - 2 * shared).sqrt()
    difference_error = ((ppl * error) ** 2 + (base * base_error) ** 2 - 2 * ppl * base * shared).sqrt()
    ratio = (log_ppl - log_base).exp()
    expected = {
        ours.ppl: (ppl, ppl * error),
        ours.ppl_base: (base, base * base_error),
        ours.ln_ppl_ratio: (log_ppl - log_base, ratio_error),
        ours.ppl_ratio: (ratio, ratio * ratio_error),
        ours.ppl_difference: (ppl - base, difference_error),
    }
    for found, (value, its_error) in expected.items():
        assert close(found.value, value)
        assert close(found.error, its_error)
    assert close(ours.ppl_correlation, shared / (error * base_error))
    assert ours.positions == ROWS


FRACTIONS = {"p99_9": "0.999", "p99": "0.99", "p95": "0.95", "p90": "0.9", "p75": "0.75", "median": "0.5"}
FRACTIONS |= {"p25": "0.25", "p10": "0.1", "p5": "0.05", "p1": "0.01", "p0_1": "0.001"}


@pytest.mark.parametrize("name", ["kld", "delta_p"])
def test_divergence_and_delta_p(both: tuple[Statistics, Plain], name: str) -> None:
    ours: Distribution = getattr(both[0], name)
    plain: list[Decimal] = getattr(both[1], name)
    mean, error = mean_and_uncertainty(plain)
    assert close(ours.mean, mean)
    assert close(ours.error, error)
    assert close(ours.max, max(plain))
    assert close(ours.min, min(plain))
    for key, fraction in FRACTIONS.items():
        assert close(getattr(ours, key), between(plain, fraction)), key


def test_rms_of_delta_p_and_same_top(both: tuple[Statistics, Plain]) -> None:
    ours, plain = both
    square, square_error = mean_and_uncertainty([d * d for d in plain.delta_p])
    assert close(ours.delta_p_rms.value, square.sqrt())
    assert close(ours.delta_p_rms.error, square_error / (2 * square.sqrt()))
    share = sum(plain.same_top) / ROWS
    assert close(ours.same_top.value, share)
    assert close(ours.same_top.error, (share * (1 - share) / (ROWS - 1)).sqrt())


# -- what holds exactly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 3.0, 300.0])
def test_the_base_against_itself_is_zero_in_every_bit(scale: float) -> None:
    same = logits(1, scale)
    track = track_of(same, same.copy())
    found = all_of(track)
    assert track.equal == ROWS
    assert set(track.kld) == set(track.delta_p) == {0.0}
    assert set(found.kld) == set(found.delta_p) == {0.0}
    assert found.delta_p_rms == found.ln_ppl_ratio == found.ppl_difference == (0.0, 0.0)
    assert found.same_top == found.ppl_ratio == (1.0, 0.0)
    assert (found.ppl, found.ppl_correlation) == (found.ppl_base, 1.0)


def test_divergence_does_not_depend_on_how_the_text_was_cut() -> None:
    base, other = logits(1), near(2, 0.3)
    whole, cut = track_of(base, other), Track()
    for start, stop in ((0, 1), (1, 9), (9, ROWS)):
        cut.add(Base(base[start:stop], TARGETS[start:stop]), start, other[start:stop])
    assert cut == whole


def test_the_last_position_has_no_target_and_only_its_bits_count() -> None:
    base, other = logits(1), near(2, 0.3)
    other[-1] = base[-1]
    track = track_of(base, other, TARGETS[:-1])
    assert (len(track.kld), track.equal) == (ROWS - 1, 1)


def test_bits_and_not_values_are_equal() -> None:
    assert equal_rows(np.array([[0.0, 1.0], [2.0, 3.0]], np.float32), np.array([[-0.0, 1.0], [2, 3]], np.float32)) == 1


def test_tokens_without_probability_count_nothing_in_the_base_and_everything_elsewhere() -> None:
    base, other = logits(1), logits(1)
    base[0, 1] = other[0, 1] = -np.inf
    other[1, TARGETS[1]] = -np.inf
    track = track_of(base, other)
    assert (track.kld[0], track.kld[1], track.kld[2]) == (0.0, math.inf, 0.0)
    assert (track.nll[1], track.delta_p[1]) == (math.inf, -math.exp(-track.nll_base[1]))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_overflowed_are_infinitely_far_and_those_of_the_base_an_error(broken: float) -> None:
    damaged = logits(1)
    damaged[3, 2] = broken
    track = track_of(logits(1), damaged)
    assert (track.kld[3], track.nll[3], track.same_top[3], track.equal) == (math.inf, math.inf, 0, ROWS - 1)
    found = all_of(track)
    assert (found.kld.mean, found.kld.max, found.kld.median) == (math.inf, math.inf, 0.0)
    with pytest.raises(BadLogits):
        Base(damaged, TARGETS)


def test_few_values_have_no_error() -> None:
    one = distribution([0.5])
    assert math.isnan(one.error)
    assert set(one._replace(error=0.5)) == {0.5}
    assert percentile([1.0, math.inf], 0.0) == 1.0
