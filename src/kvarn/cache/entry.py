"""An open sequence of a cache, and checks of what callers give for it."""

from array import array
from collections.abc import Sequence

from kvarn.cache.residency import Residency
from kvarn.cache.usage import Query
from kvarn.errors import BadStep


def ids_of(tokens: Sequence[int]) -> Sequence[int]:
    """Check token ids on entry, so that a bad id cannot interrupt an update."""
    try:
        return array("q", tokens)
    except (TypeError, OverflowError):
        raise BadStep("tokens must be integers of at most 64 bits") from None


def check_whole(length: int) -> None:
    if not isinstance(length, int):
        raise BadStep(f"a length of {length!r}: it must be a whole number")


class Entry:
    """One open sequence: its table row and its residency in each group."""

    __slots__ = ("prepared", "query", "residencies", "row", "tail_from")

    def __init__(self, row: int, residencies: tuple[Residency, ...]) -> None:
        self.row = row
        self.residencies = residencies
        self.prepared = 0  # `advance` may go up to this position: the end of the prepared step
        self.query: Query | None = None  # the prompt's lookup, until a token of the prompt is computed
        self.tail_from = 0  # with a tail: it has the tiles from this position on, up to the end of the sequence
