"""The reference operations: rows do not depend on their neighbours; formulas against float64."""

import numpy as np
import pytest
from support.harness import bits, pool, using

from kvarn import native
from kvarn.arithmetic import dots
from kvarn.backends.reference import rope as rotation
from kvarn.backends.reference.ops import gelu, silu
from kvarn.graph.ops import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from kvarn.models import rope


@pytest.mark.requirement(21)
@pytest.mark.parametrize(("n_in", "n_out"), [(48, 80), (576, 1536), (1536, 576), (576, 192), (2048, 256), (643, 1021)])
def test_a_row_of_a_product_depends_on_nothing_but_itself(n_in: int, n_out: int) -> None:
    """Each row in every place of a batch, with other rows and with none beside it, on every instruction set."""
    rng = np.random.default_rng(n_in)
    weight = rng.standard_normal((n_out, n_in)).astype(np.float32)
    x = rng.standard_normal((37, n_in)).astype(np.float32)
    together = dots(x, weight)
    assert np.abs(together - x.astype(np.float64) @ weight.astype(np.float64).T).max() < 1e-7 * n_in
    for name in native.isas():
        with using(name):
            assert (bits(dots(x, weight, pool(3))) == bits(together)).all()
            for row in (0, 1, 7, 15, 16, len(x) - 1):
                assert (bits(dots(x[row : row + 1], weight)) == bits(together[row : row + 1])).all()
    for shift in range(1, 17):
        moved = dots(np.roll(x, shift, axis=0), weight)
        assert (bits(moved) == bits(np.roll(together, shift, axis=0))).all()
        columns = dots(x, np.roll(weight, shift, axis=0))
        assert (bits(columns) == bits(np.roll(together, shift, axis=1))).all()


def test_activations() -> None:
    x = np.linspace(-100, 100, 4001, dtype=np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        assert np.abs(silu(x) - wide / (1 + np.exp(-wide))).max() < 1e-5
    exact = 0.5 * wide * (1 + np.tanh(0.7978845608028654 * (wide + 0.044715 * wide**3)))
    assert np.abs(gelu(x) - exact).max() < 2e-5


def test_rope_linear_and_factor_scaling_slow_the_rotation() -> None:
    plain = rope.frequencies(Rope(10_000.0, 64))
    assert np.allclose(rope.frequencies(Rope(10_000.0, 64, LinearScaling(4.0))), plain / 4)
    factors = tuple(float(i + 1) for i in range(32))
    assert np.allclose(rope.frequencies(Rope(10_000.0, 64, FactorScaling(factors))), plain / np.arange(1, 33))


def test_rope_llama3_scaling() -> None:
    """Llama 3.1's constants: short wavelengths stay, long ones are slowed eightfold, those between are blended."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = rope.frequencies(Rope(500_000.0, 128))
    scaled = rope.frequencies(Rope(500_000.0, 128, scaling))
    wavelength = 2 * np.pi / plain
    assert np.allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    assert np.allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rope_yarn_scaling() -> None:
    """Many turns in the original context: kept. Less than one: interpolated. The values grow by the temperature."""
    yarn = Rope(10_000.0, 128, YarnScaling(4.0, 4096))
    plain, scaled = rope.frequencies(Rope(10_000.0, 128)), rope.frequencies(yarn)
    turns = 4096 * plain / (2 * np.pi)
    assert np.allclose(scaled[turns > 40], plain[turns > 40])
    assert np.allclose(scaled[turns < 0.9], plain[turns < 0.9] / 4)
    assert rope.magnitude(yarn) == pytest.approx(1 + 0.1 * np.log(4))
    x = np.ones((1, 1, 128), np.float32)
    assert np.linalg.norm(rotation.apply(x, np.array([77]), yarn)) == pytest.approx(
        rope.magnitude(yarn) * np.linalg.norm(x), rel=1e-5
    )


def test_rope_leaves_the_rest_of_a_head_alone() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)
    out = rotation.apply(x, np.array([5, 9]), Rope(100.0, 8))
    assert (out[..., 8:] == x[..., 8:]).all()
    assert not np.allclose(out[..., :8], x[..., :8])
