"""A constraint allows or forbids the next token of a sample. `FREE` allows every token.

Contract: the answers of a constraint depend on the tokens of the sample only, not on what it was asked
before. So a step that is repeated, a preemption and a batch change nothing. Each sample has its own
constraint, which may keep a state to save work.
"""

from collections.abc import Sequence
from typing import Protocol

from kvarn.arrays import Doubles


class Constraint(Protocol):
    """`output` has the tokens of the answer so far, and none of the prompt."""

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        """Set the scores [vocabulary] of forbidden tokens to -infinity, in place."""

    def complete(self, output: Sequence[int]) -> bool:
        """Whether the answer is complete: nothing but an end token could follow."""


class Free:
    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        pass

    def complete(self, output: Sequence[int]) -> bool:
        return False


FREE = Free()
