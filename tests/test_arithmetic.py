"""kvarn's own elementary functions and sums: near the C library's, special cases, and places that do not matter."""

import math

import numpy as np
import pytest
from support.harness import bits

from kvarn import arithmetic
from kvarn.graph.ops import Rope
from kvarn.models.rope import frequencies

RNG = np.random.default_rng(11)


def units_apart(found: np.ndarray, expected: list[float]) -> int:
    """In the last place of a float64."""
    return int(np.abs(found.view(np.int64) - np.array(expected).view(np.int64)).max())


@pytest.mark.parametrize(
    ("ours", "library", "x"),
    [
        (arithmetic.exp, math.exp, np.concatenate((RNG.uniform(-708, 709.7, 50_000), RNG.uniform(-2, 2, 50_000)))),
        (arithmetic.log, math.log, 2.0 ** np.concatenate((RNG.uniform(-1, 1, 9_999), RNG.uniform(-1e3, 1e3, 50_000)))),
        (lambda x: arithmetic.sin_cos(x)[0], math.sin, RNG.uniform(-10, 1.5e6, 100_000)),
        (lambda x: arithmetic.sin_cos(x)[1], math.cos, RNG.uniform(-10, 1.5e6, 100_000)),
    ],
    ids=["exp", "log", "sin", "cos"],
)
def test_elementary_functions_are_within_two_units_of_the_library(ours, library, x: np.ndarray) -> None:
    """Each of the two is within one of the truth."""
    assert units_apart(ours(x), [library(value) for value in x.tolist()]) <= 2


def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    exp = arithmetic.exp(np.array([0.0, inf, -inf, 710.0, -709.0, nan]))
    assert exp[:5].tolist() == [1.0, inf, 0.0, inf, 0.0]
    assert np.isnan(exp[5])
    log = arithmetic.log(np.array([1.0, inf, 0.0, -1.0, nan]))
    assert log[:3].tolist() == [0.0, inf, -inf]
    assert np.isnan(log[3:]).all()
    assert arithmetic.sin_cos(np.zeros(1)) == (0.0, 1.0)


def test_an_element_depends_on_nothing_but_itself() -> None:
    x = RNG.uniform(-50, 50, 1003)
    together = arithmetic.exp(x)
    for at in (0, 1, 7, 500, 1002):
        assert arithmetic.exp(x[at : at + 1])[0] == together[at]
    assert (arithmetic.exp(x[::-1])[::-1] == together).all()
    assert (arithmetic.exp(x[1:])[::2] == arithmetic.exp(x[1::2])).all()


def test_sums_of_products_leave_out_what_is_not_seen() -> None:
    weights = RNG.uniform(0, 1, (2, 5, 33)).astype(np.float32)
    v = RNG.standard_normal((2, 33, 7)).astype(np.float32)
    seen = RNG.uniform(size=(5, 33)) < 0.5
    expected = np.einsum("bmj,bjd->bmd", np.where(seen, weights, 0).astype(np.float64), v.astype(np.float64))
    assert np.abs(arithmetic.weigh(weights, seen, v) - expected).max() < 1e-6
    poisoned = v.copy()
    poisoned[:, 4] = np.nan
    clean = ~seen[:, 4]
    found, expected = arithmetic.weigh(weights, seen, poisoned), arithmetic.weigh(weights, seen, v)
    assert (bits(found[:, clean]) == bits(expected[:, clean])).all()
    assert np.isnan(found[:, ~clean]).all()


def test_products_have_batches_and_may_be_empty() -> None:
    a, b = RNG.standard_normal((2, 3, 5, 12)).astype(np.float32), RNG.standard_normal((2, 3, 4, 12)).astype(np.float32)
    assert np.abs(arithmetic.dots(a, b) - a @ b.swapaxes(-1, -2)).max() < 1e-5
    assert arithmetic.dots(a[0, 0, :0], b[0, 0]).shape == (0, 4)


def test_arrays_that_do_not_fit_are_refused() -> None:
    a = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="dots: a is"):
        arithmetic.dots(a, np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="contiguous float64"):
        arithmetic.exp(a[0])  # type: ignore[arg-type]


def test_frequencies_are_rounded_correctly() -> None:
    """The base to the power of -i / dim: a power of ten where the exponent is a simple fraction."""
    assert frequencies(Rope(10_000.0, 8)).tolist() == [1.0, 0.1, 0.01, 0.001]
    assert frequencies(Rope(1e8, 16)).tolist() == [1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7]
