"""The line through time and bytes per token, without measuring any."""

import pytest

from kvarn.bench.flatness import fit


def test_the_fit_finds_slope_and_intercept() -> None:
    """Tokens that cost 1 ms and every byte at 20 GB/s; 10 layers of 8 heads."""
    points = [
        {"bytes_per_token": 1e8 + 2e4 * depth, "ms_per_token": 1.0 + (1e8 + 2e4 * depth) / 20e6, "python_share": 0.02}
        for depth in (0, 1000, 4000, 8000)
    ]
    line = fit(points, lambda nbytes: 20.0, layers=10, heads=8)
    assert line["slope_gb_s"] == pytest.approx(20)
    assert line["intercept_ms"] == pytest.approx(1)
    assert line["r_squared"] == pytest.approx(1)
    assert line["growth_over_bandwidth"] == pytest.approx(1)
    assert line["attention_us_per_layer_and_head_at_deepest"] == pytest.approx(8000 / 80)
