"""What a sample may say next: a mask over the vocabulary that follows its tokens. The null object forbids nothing."""

from typing import Protocol

from kvarn.arrays import Doubles


class Constraint(Protocol):
    """One per sample. It is told every token of the answer, in order, and none of the prompt."""

    def mask(self, scores: Doubles) -> None:
        """Set the scores [vocabulary] of the tokens that may not come next to -infinity, in place."""

    def accept(self, token: int) -> None: ...


class Free:
    def mask(self, scores: Doubles) -> None:
        pass

    def accept(self, token: int) -> None:
        pass


FREE = Free()
