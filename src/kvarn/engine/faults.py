"""After a failed step, its samples run one at a time. The sample that caused the error then fails alone."""

from collections import deque
from collections.abc import Iterable

from kvarn.engine.request import Sample


class OneByOne:
    """The samples of a failed step that still have to run alone, oldest first."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._pending = deque(samples)

    def put_first(self, sample: Sample) -> None:
        self._pending.appendleft(sample)

    def next(self) -> Sample | None:
        """The next sample to run alone. Skips samples that finished, or that ran again without an error."""
        while self._pending and (self._pending[0].finish_reason or _caught_up(self._pending[0])):
            self._pending.popleft()
        return self._pending[0] if self._pending else None


def _caught_up(sample: Sample) -> bool:
    return sample.computed > 0 and sample.missing == 1
