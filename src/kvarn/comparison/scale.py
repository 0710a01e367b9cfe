"""Axes of a plot: from values to coordinates, and which values get a label. No drawing.

A logarithmic scale has a place of its own for 0, below its lowest power of ten: exactly 0 is the result
that matters most, and a logarithm has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """From 0 to `top`."""

    top: float
    low: float  # coordinates of 0 and of `top`
    high: float

    def __call__(self, value: float) -> float:
        return self.low + (self.high - self.low) * value / self.top

    def ticks(self) -> list[float]:
        step = round_step(self.top / 5)
        return [i * step for i in range(math.floor(self.top / step + 1e-9) + 1)]


def linear(values: Sequence[float], low: float, high: float) -> Linear:
    """Up to a round number."""
    most = max([*values, 0.0]) or 1.0
    step = round_step(most * 1.05 / 5)
    return Linear(math.ceil(most * 1.05 / step) * step, low, high)


def round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not less than this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """Powers of ten from `first` to `last`, above a place for 0."""

    first: int
    last: int
    zero: float  # coordinate of 0
    low: float  # of 10 ** first
    high: float  # of 10 ** last

    def __call__(self, value: float) -> float:
        if value <= 0:
            return self.zero
        place = (math.log10(value) - self.first) / (self.last - self.first)
        return self.low + (self.high - self.low) * min(max(place, 0.0), 1.0)

    def ticks(self) -> list[int]:
        """Exponents."""
        every = max((self.last - self.first) // 6, 1)
        return list(range(self.first, self.last + 1, every))


def logarithmic(values: Sequence[float], zero: float, low: float, high: float) -> Logarithmic:
    seen = [value for value in values if 0 < value < math.inf] or [1.0]
    first, last = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
    return Logarithmic(first, max(last, first + 1), zero, low, high)


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Coordinates for labels near the wanted ones, at least `gap` apart, in the same order, within low and high if
    there is room."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = [0.0] * len(wanted)
    at = low - gap
    for i in order:
        at = placed[i] = max(wanted[i], at + gap)
    at = high + gap
    for i in reversed(order):
        at = placed[i] = min(placed[i], at - gap)
    return placed
