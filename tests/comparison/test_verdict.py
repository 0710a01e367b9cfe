"""Which word a cache gets. f16 cells, the control, say how far the smallest change leads."""

import math

import pytest

from kvarn.comparison.divergence import Track
from kvarn.comparison.verdict import LEVELS, Worst, limit, thresholds, verdict

N = 1000
SILENT, NOISY = Worst(1e-6, 1.0), Worst(0.02, 0.975)  # controls of models without and with rounded activations


def track(kld: float, equal: int = 0) -> Track:
    return Track(kld=[kld * (0.5 + i / N) for i in range(N)], equal=equal)


@pytest.mark.parametrize(
    ("of", "control", "word"),
    [
        (Worst(0.019, 0.991), SILENT, "safe"),
        (Worst(0.021, 0.991), SILENT, "close"),
        (Worst(0.019, 0.989), SILENT, "close"),
        (Worst(0.099, 0.971), SILENT, "close"),
        (Worst(0.101, 0.999), SILENT, "different"),
        (Worst(0.019, 0.969), SILENT, "different"),
        (Worst(0.039, 0.966), NOISY, "safe"),
        (Worst(0.041, 0.966), NOISY, "close"),
        (Worst(0.039, 0.964), NOISY, "close"),
        (Worst(9.0, 0.8), NOISY, "different"),
        (Worst(math.inf, 0.0), SILENT, "different"),
        (Worst(0.019, 0.991), Worst(math.inf, 0.0), "safe"),
    ],
)
def test_words(of: Worst, control: Worst, word: str) -> None:
    assert verdict(track(0.01), N, of, control, track(0.001)) == word


def test_equal_bits_are_lossless_and_one_other_bit_is_not() -> None:
    assert verdict(track(0, N), N, Worst(0, 1), SILENT, track(0.001)) == "lossless"
    assert verdict(track(0, N - 1), N, Worst(0, 1), SILENT, track(0.001)) == "noise"


def test_not_farther_than_the_control_is_noise() -> None:
    control = track(0.003)
    alike = Track(kld=[kld + (0.0005 if i % 2 else -0.0005) for i, kld in enumerate(control.kld)])
    farther = Track(kld=[kld + 0.00005 for kld in control.kld])
    assert verdict(alike, N, NOISY, NOISY, control) == "noise"
    assert verdict(control, N, NOISY, NOISY, control) == "noise"
    assert verdict(farther, N, NOISY, NOISY, control) == "safe", "a difference at every position is no chance"


def test_the_printed_thresholds_are_those_that_are_applied() -> None:
    lines = thresholds(NOISY)
    for level in LEVELS:
        least = limit(level, NOISY)
        (line,) = (line for line in lines if line.startswith(f"{level.word}:"))
        assert f"below {least.kld:.3g} " in line
        assert f"above {100 * least.same_top:.2f} %" in line
