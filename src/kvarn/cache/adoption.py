"""What a prompt reused from the cache, where reuse ended, and why."""

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why reuse of a prompt ended."""

    END = "nothing left to reuse"  # all but the last token are reused; the last is computed for its logits
    NEW = "new from here on"  # the earlier text ended here, and all of it is reused
    NOTHING_SHARED = "nothing shared"
    DIFFERS = "differs"
    EVICTED = "evicted"
    SHORT = "shorter than a block"  # the other shared tokens were in a partly filled block that was not kept
    OUT_OF_WINDOW = "out of window"
    TILE = "not a whole tile"  # the other shared tokens do not fill one, and these cells are reused by tiles
    NOT_SHARING = "strategy does not share"
    LOGITS = "logits asked for"  # of the prompt's tokens, so the prompt is computed
    STATES = "states asked for"  # the same for the mean of hidden states
    NOT_WORTH_IT = "stored, not worth reading"  # a tier has more, and computing it was expected to be faster
    TOO_SLOW = "stored, read too slowly"  # reading took as long as computing was expected to take
    DAMAGED = "stored, damaged"  # a file of a tier did not hold what its name promises; it was removed


class ReuseLimit(NamedTuple):
    """Where reuse of a prompt ended, and why."""

    reason: Reason
    at: int  # length of the prefix that an earlier text also had, whether it can be reused or not
    ours: int | None = None  # DIFFERS: our token at `at`
    theirs: int | None = None  # DIFFERS: the token at `at` of the nearest earlier text with the same salt
    onward: tuple[int, ...] = ()  # DIFFERS: the next tokens of that text, `theirs` included
    when: float | None = None  # EVICTED, OUT_OF_WINDOW: time of the eviction, in seconds since the epoch


class Adoption(NamedTuple):
    reused: int
    limit: ReuseLimit


class Fetched(NamedTuple):
    """What tiers gave to a prompt: tokens beyond those that the cache had itself."""

    asked: bool = False  # whether there are tiers
    local: int = 0  # tokens that the cache had itself
    host_tokens: int = 0  # reused from host memory
    host_seconds: float = 0.0
    disk_tokens: int = 0
    disk_seconds: float = 0.0
    limit: ReuseLimit | None = None  # why tiers did not give all that they have

    @property
    def tokens(self) -> int:
        return self.host_tokens + self.disk_tokens


NOT_FETCHED = Fetched()
