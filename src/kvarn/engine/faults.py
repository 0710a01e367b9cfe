"""After a step that failed: its samples run one by one, so that the one at fault fails alone."""

from collections import deque

from kvarn.engine.request import Sample


class OneByOne:
    """Samples of a failed step that have not run again yet, in their order of arrival."""

    def __init__(self) -> None:
        self._pending: deque[Sample] = deque()

    def put_first(self, sample: Sample) -> None:
        self._pending.appendleft(sample)

    def next(self) -> Sample | None:
        """The sample to run alone. Samples that finished, or ran again without failing, are dropped."""
        while self._pending and (self._pending[0].finish_reason or _caught_up(self._pending[0])):
            self._pending.popleft()
        return self._pending[0] if self._pending else None


def _caught_up(sample: Sample) -> bool:
    return sample.computed > 0 and sample.missing == 1
