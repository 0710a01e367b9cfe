"""Tiers as the engine sees them: before a prompt is computed, its blocks may come from a tier.

A sample whose blocks are read is running, but it has no part in steps until they are there. A step never waits
for a tier: `advance` takes what has arrived. Without tiers, `NO_TIERS` finds nothing.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

from kvarn.cache.adoption import NOT_FETCHED, Fetched
from kvarn.engine.request import Sample


class Fetch(Protocol):
    """Blocks of one prompt on their way into the cache."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""

    @property
    def facts(self) -> Fetched:
        """What came, after the end."""

    def advance(self) -> bool:
        """Plant the blocks that have arrived, some in each call. True at the end, after which `adopt` finds them."""

    def cancel(self) -> None: ...


class TierCount(Protocol):
    """Figures of one tier."""

    @property
    def nbytes(self) -> int: ...
    @property
    def reads(self) -> int: ...
    @property
    def writes(self) -> int: ...
    @property
    def drops(self) -> int: ...


class Tiers(Protocol):
    def begin(self, seq: int, tokens: Sequence[int], spare: int) -> Fetch | None:
        """Look for the blocks of the prompt of an open sequence. The fetch may be over at once. None if they do not
        fit now, with room for the rest of the prompt or for `spare` tokens of it."""

    def wait(self, seconds: float) -> None:
        """Return when a block has arrived, or after this time."""

    def computed(self, tokens: int, seconds: float) -> None:
        """So long took a step that computed prompts."""

    def counts(self) -> Mapping[str, TierCount]:
        """By the name of the tier."""

    def drain(self) -> str:
        """Store everything that is resident, between two steps. Returns what was done, in words."""

    def words(self) -> str:
        """What they are; empty if there are none."""


class _Nothing:
    facts, over = NOT_FETCHED, True

    def advance(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class _NoTiers:
    def begin(self, seq: int, tokens: Sequence[int], spare: int) -> Fetch | None:
        return _Nothing()

    def wait(self, seconds: float) -> None:
        pass

    def computed(self, tokens: int, seconds: float) -> None:
        pass

    def counts(self) -> Mapping[str, TierCount]:
        return {}

    def drain(self) -> str:
        return ""

    def words(self) -> str:
        return ""


NO_TIERS: Tiers = _NoTiers()
RETRY = 0.05  # seconds until a sample for which there was no room is looked at again
PAUSE = 0.005  # seconds to wait for a block when there is nothing to compute: then others get their turn


class Found(Enum):
    READING = auto()
    NOTHING = auto()  # to read, or it is not worth it
    NO_ROOM = auto()


class Recall:
    """The samples whose blocks are being read."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._reading: dict[Sample, Fetch] = {}
        self._refused: tuple[Sample | None, float] = None, 0.0  # the last one without room, and when

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._reading

    def begin(self, sample: Sample, tokens: Sequence[int], spare: int, crowded: bool) -> Found:
        """Start to read the blocks of its prompt, if that is worth it. Call `end` before `adopt`, in any case.
        `crowded`: others are running, and may hold the room."""
        last, when = self._refused
        if crowded and last is sample and time.perf_counter() < when + RETRY:  # a lookup hashes the whole prompt
            return Found.NO_ROOM
        fetch = self._tiers.begin(sample.id, tokens, spare)
        if fetch is None:
            self._refused = sample, time.perf_counter()
            return Found.NO_ROOM
        self._reading[sample] = fetch
        if fetch.over:
            return Found.NOTHING
        timing = sample.request.timing
        timing.started_at = timing.started_at or time.perf_counter()
        return Found.READING

    def advance(self, sample: Sample) -> bool:
        """Whether the sample can be computed now."""
        return self._reading[sample].advance()

    def end(self, sample: Sample) -> Fetched:
        fetch = self._reading.pop(sample, None)
        if fetch is None:
            return NOT_FETCHED
        fetch.cancel()
        return fetch.facts

    def clear(self) -> None:
        for sample in list(self._reading):
            self.end(sample)

    def pause(self) -> None:
        """There is nothing to compute."""
        if self._reading:
            self._tiers.wait(PAUSE)
