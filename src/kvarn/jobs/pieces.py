"""The answers of jobs as a stream of text: `Pieces` and `Split` never wait, the streams do.

A stream that is closed, dropped or interrupted cancels its requests. Non-goal: asyncio (async_pieces.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvarn.chats.answer import Reader, content_of
from kvarn.dialect import Delta
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError
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


class Split:
    """One answer in its parts, from its pieces."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._ready: deque[Delta] = deque()
        self.ended = False

    def add(self, piece: Piece | None, jobs: Sequence[Job]) -> None:
        """None: there are no more."""
        self._reader = self._reader or (jobs[0].new_reader(0) if jobs else None)
        self.ended = piece is None
        if self._reader is not None:
            self._ready += self._reader.finish() if piece is None else self._reader.push(piece.text)

    def take(self) -> Delta | None:
        """The next part; None if there is none now."""
        return self._ready.popleft() if self._ready else None


class BatchStream(Iterator[Piece]):
    """The answers to several prompts, piece by piece, in the order in which they are computed."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self._runner = runner
        self._pieces = Pieces(jobs)
        self.jobs = jobs
        self.closed = False

    def __next__(self) -> Piece:
        if self.closed:
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
        return [job.output() for job in self.jobs]

    def close(self) -> None:
        """Cancel what is not finished. There are no more pieces."""
        self.closed = True
        for job in self.jobs:
            self._runner.cancel(job)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Parts(Iterator[Delta]):
    """The parts of one answer, as they are computed."""

    def __init__(self, batch: BatchStream) -> None:
        self._batch = batch
        self._split = Split()

    def __next__(self) -> Delta:
        while (part := self._split.take()) is None and not self._split.ended:
            self._split.add(next(self._batch, None), self._batch.jobs)
        if part is None or self._batch.closed:
            raise StopIteration
        return part


class Stream(Iterator[str]):
    """The text of one answer, piece by piece. Reasoning and tool calls are not part of it."""

    def __init__(self, runner: Runner, job: Job) -> None:
        self._batch = BatchStream(runner, [job])
        self._parts = Parts(self._batch)

    def __next__(self) -> str:
        for part in self._parts:
            if text := content_of(part):
                return text
        raise StopIteration

    def parts(self) -> Parts:
        """The answer with its reasoning and tool calls, as kvarn.dialect's deltas. A part comes once, here or as
        text."""
        return self._parts

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


def one_answer(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise KvarnError(f"a stream has one answer and n is {params.n}: use stream_batch")
    return params
