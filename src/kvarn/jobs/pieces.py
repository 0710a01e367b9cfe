"""The answers of jobs as a stream of text: `Pieces` never waits, `Stream` and `BatchStream` do.

A stream that is closed, dropped or interrupted cancels its requests. Non-goal: asyncio (async_pieces.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvarn.jobs.job import Job, Output
from kvarn.jobs.runner import Runner


class Piece(NamedTuple):
    """A part of an answer.

    prompt  which prompt of the batch, from 0
    sample  which of its answers, from 0 to n - 1
    text    never empty
    """

    prompt: int
    sample: int
    text: str


class Pieces:
    """The text of jobs that can no longer change. An error of a job is raised after the text that came before it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._open = [(i, k) for i, job in enumerate(jobs) for k in range(len(job.texts))]
        self._ready: deque[Piece] = deque()
        self._error: BaseException | None = None

    def moved(self) -> bool:
        """Whether `take` would find something new. Any thread may call it."""
        return any(self.jobs[i].done or self.jobs[i].texts[k].ready for i, k in self._open)

    @property
    def ended(self) -> bool:
        return not self._open and not self._ready

    def take(self) -> Piece | None:
        """The next piece; None if there is none now."""
        if not self._ready:
            if self._error is not None:
                raise self._error
            self._collect()
        return self._ready.popleft() if self._ready else None

    def _collect(self) -> None:
        unfinished = []
        for i, k in self._open:
            job = self.jobs[i]
            done = job.done  # read before `take`: no text is added after it is true
            if text := job.texts[k].take():
                self._ready.append(Piece(i, k, text))
            if not done:
                unfinished.append((i, k))
            elif job.request.error is not None and self._error is None:
                self._error = job.request.error
        self._open = unfinished if self._error is None else []
        if self._error is not None and not self._ready:
            raise self._error


class BatchStream(Iterator[Piece]):
    """The answers to several prompts, piece by piece, in the order in which they are computed."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self._runner = runner
        self._pieces = Pieces(jobs)
        self._closed = False

    def __next__(self) -> Piece:
        if self._closed:
            raise StopIteration
        try:
            while (piece := self._pieces.take()) is None and not self._pieces.ended:
                self._runner.advance(self._pieces.moved)
        except BaseException:
            self.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    @property
    def outputs(self) -> list[Output]:
        """The answers: whole after the last piece, before it what there is so far."""
        return [job.output() for job in self._pieces.jobs]

    def close(self) -> None:
        """Cancel what is not finished. There are no more pieces."""
        self._closed = True
        for job in self._pieces.jobs:
            self._runner.cancel(job)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Stream(Iterator[str]):
    """The text of one answer, piece by piece."""

    def __init__(self, runner: Runner, job: Job) -> None:
        self._batch = BatchStream(runner, [job])

    def __next__(self) -> str:
        return next(self._batch).text

    @property
    def output(self) -> Output:
        """The answer: whole after the last piece, before it what there is so far."""
        return self._batch.outputs[0]

    def close(self) -> None:
        """Cancel the answer, if it is not finished."""
        self._batch.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
