"""Rotary position embedding: frequencies and magnitude, with the scalings that models use."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvarn.models.config import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling


@lru_cache
def frequencies(rope: Rope) -> NDArray[np.float64]:
    """[dim / 2] radians per position."""
    plain: NDArray[np.float64] = rope.base ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
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
    return 1.0 + 0.1 * math.log(rope.scaling.factor)


def _llama3(plain: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: NDArray[np.float64], rope: Rope, scaling: YarnScaling) -> NDArray[np.float64]:
    """Dimensions that turn often keep their frequency, those that turn seldom are slowed, with a ramp between."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
