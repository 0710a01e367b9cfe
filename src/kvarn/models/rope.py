"""Rotary position embedding: frequencies and magnitude, with the scalings that models use.

Powers and logarithms are computed with `decimal` and rounded correctly. A library's results are not the
same on every machine: NumPy's power differs with and without AVX-512. A wrong last bit matters, because
an angle is a frequency times a position of up to a million.
"""

import math
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvarn.graph.ops import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling


@lru_cache
def frequencies(rope: Rope) -> NDArray[np.float64]:
    """[dim / 2] radians per position."""
    plain = np.array([_power(rope.base, -i / rope.dim) for i in range(0, rope.dim, 2)])
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FactorScaling(factors):
            return np.asarray(plain / np.array(factors, np.float64))
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


def magnitude(rope: Rope) -> float:
    """What the rotated values are multiplied by: YaRN's temperature, else 1."""
    if not isinstance(rope.scaling, YarnScaling):
        return 1.0
    if rope.scaling.attention_factor is not None:
        return rope.scaling.attention_factor
    return yarn_magnitude(rope.scaling.factor)


def yarn_magnitude(factor: float) -> float:
    return 1.0 + 0.1 * _log(factor)


_DIGITS = Context(prec=50)


def _power(base: float, exponent: float) -> float:
    return float(_DIGITS.exp(_DIGITS.multiply(Decimal(exponent), _DIGITS.ln(Decimal(base)))))


def _log(x: float) -> float:
    return float(_DIGITS.ln(Decimal(x)))


def _llama3(plain: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: NDArray[np.float64], rope: Rope, scaling: YarnScaling) -> NDArray[np.float64]:
    """Dimensions that turn often keep their frequency, those that turn seldom are slowed, with a ramp between."""

    def dimension(turns: float) -> float:
        return rope.dim * _log(scaling.original_context / (turns * 2 * math.pi)) / (2 * _log(rope.base))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
