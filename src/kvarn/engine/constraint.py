"""A constraint allows or forbids the next token of a sample. `FREE` allows every token."""

from typing import Protocol

from kvarn.arrays import Doubles


class Constraint(Protocol):
    """The state of one sample."""

    def mask(self, scores: Doubles) -> None:
        """Set the scores [vocabulary] of forbidden tokens to -infinity, in place."""

    def accept(self, token: int) -> None:
        """Called with every token of the answer, in order, and with no token of the prompt."""


class Free:
    def mask(self, scores: Doubles) -> None:
        pass

    def accept(self, token: int) -> None:
        pass


FREE = Free()
