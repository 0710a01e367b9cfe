"""What a benchmark measures, in llama-bench's words, and what it reports. Numbers only: printing is elsewhere.

pp N @ depth D, batch B     B sequences that have D tokens in the cache each get N more, as prompts come in
tg N @ depth D, batch B     B sequences that have D tokens generate N more, one at a time and side by side
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
        """Tokens that a sequence comes to have: depth, n, and the one that is predicted last."""
        return self.depth + self.n + 1


class Reading(NamedTuple):
    """One repetition of a case."""

    tokens: int
    seconds: float
    nbytes: int = 0  # read: the weights in every step, and cells; 0 where the subject does not tell
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Subject(Protocol):
    """Something that can be measured: kvarn's engine, or a peer."""

    def prepare(self, case: Case) -> None:
        """Bring it to the case's depth and batch. Not timed; what is there already is not computed again."""

    def measure(self, case: Case) -> Reading:
        """One repetition, from the case's depth."""

    def describe(self) -> dict[str, object]:
        """Which engine this is, and with which settings, for the case that was prepared last."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The repetitions of a case taken together."""

    tok_s: float  # the median
    spread: float  # (highest - lowest) / median
    samples: tuple[float, ...]  # tokens per second of each repetition, in order

    @staticmethod
    def of(readings: Sequence[Reading]) -> "Figure":
        rates = [reading.rate for reading in readings]
        middle = statistics.median(rates)
        return Figure(middle, (max(rates) - min(rates)) / middle, tuple(rates))

    def over(self, other: "Figure") -> float:
        """How many times faster: the median over repetitions that ran next to each other."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def cases(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Case]:
    """All combinations, so ordered that a cache fills once per batch. 0 tokens leave a test out."""
    wanted = [(PROMPT, n) for n in prompts if n] + [(GENERATE, n) for n in generated if n]
    return [Case(kind, n, depth, batch) for batch in batches for depth in sorted(depths) for kind, n in wanted]
