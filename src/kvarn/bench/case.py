"""The cases and the figures of a benchmark, with the names of llama-bench. Non-goal: printing.

pp N @ depth D, batch B     B sequences with D tokens in the cache; each computes N more as a prompt
tg N @ depth D, batch B     B sequences with D tokens in the cache; each generates N more in a batch
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PROMPT, GENERATE = "pp", "tg"


@dataclass(frozen=True, slots=True)
class Case:
    kind: str  # pp or tg
    n: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n}"

    @property
    def context(self) -> int:
        """Room for a sequence: depth, n, the last predicted token, and one more, so that the context never ends it."""
        return self.depth + self.n + 2


class Reading(NamedTuple):
    """One repetition of a case."""

    tokens: int
    seconds: float
    nbytes: int = 0  # bytes read: the weights in every step, and cells; 0 if the subject does not report it
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Subject(Protocol):
    """Something that can be measured: kvarn's engine, or a peer."""

    def prepare(self, case: Case) -> None:
        """Fill the cache to the case's depth and batch. Not timed. Tokens that are already there are reused."""

    def measure(self, case: Case) -> Reading:
        """Run one repetition, from the case's depth."""

    def describe(self) -> dict[str, object]:
        """The engine and its settings for the case that was prepared last."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Summary of the repetitions of a case."""

    tok_s: float  # the median
    spread: float  # (highest - lowest) / median
    samples: tuple[float, ...]  # tokens per second of each repetition, in order

    @staticmethod
    def of(readings: Sequence[Reading]) -> "Figure":
        rates = [reading.rate for reading in readings]
        median = statistics.median(rates)
        return Figure(median, (max(rates) - min(rates)) / median, tuple(rates))

    def over(self, other: "Figure") -> float:
        """How many times faster than the other: the median ratio over pairs of repetitions."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def cases(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Case]:
    """All combinations, in an order that fills the cache once per batch. A count of 0 tokens skips the test."""
    wanted = [(PROMPT, n) for n in prompts if n] + [(GENERATE, n) for n in generated if n]
    return [Case(kind, n, depth, batch) for batch in batches for depth in sorted(depths) for kind, n in wanted]
