"""The answers of jobs as asynchronous streams of text, and the event that wakes their tasks.

The requests of a stream begin when its first piece is asked for. A stream that is closed, dropped or
cancelled cancels its requests. Non-goal: stepping the engine (background.py).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from kvarn.engine.engine import Event
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError
from kvarn.jobs.job import Job, Listener, Output
from kvarn.jobs.pieces import Piece, Pieces
from kvarn.text.tokenizer import Prompt

Pairs = Sequence[tuple[Prompt, SamplingParams]]


class Starter(Protocol):
    async def start(self, prompt: Prompt, params: SamplingParams, waiter: "Waiter") -> Job: ...

    def cancel(self, jobs: Sequence[Job]) -> None: ...


class AsyncBatchStream(AsyncIterator[Piece]):
    """The answers to several prompts, piece by piece, in the order in which they are computed.

    Its requests are those of `pairs`, or those that `render` gives."""

    def __init__(self, starter: Starter, pairs: Pairs, render: Callable[[], Awaitable[Pairs]] | None = None) -> None:
        self._starter = starter
        self._pairs = pairs
        self._render = render
        self._jobs: list[Job] = []
        self._pieces: Pieces | None = None
        self._closed = False
        self._reading = False

    async def __anext__(self) -> Piece:
        if self._reading:
            raise KvarnError("this stream is being read by another task: make a stream for each")
        self._reading = True
        try:
            piece = await self._next()
        finally:
            self._reading = False
        if piece is None or self._closed:
            raise StopAsyncIteration
        return piece

    async def _next(self) -> Piece | None:
        if self._closed:
            return None
        try:
            if self._pieces is None:
                self._pieces = await self._start()
            while (piece := self._pieces.take()) is None and not self._pieces.ended and not self._closed:
                await self._waiter.progress()
        except BaseException:
            self.close()
            raise
        return piece

    async def _start(self) -> Pieces:
        self._waiter = Waiter(each_token=True)
        for prompt, params in self._pairs if self._render is None else await self._render():
            self._jobs.append(await self._starter.start(prompt, params, self._waiter))
            if self._closed:  # while it started
                self._starter.cancel(self._jobs)
                break
        return Pieces(self._jobs)

    @property
    def outputs(self) -> list[Output]:
        """The answers: whole after the last piece, before it what there is so far."""
        return [job.output() for job in self._jobs]

    def close(self) -> None:
        """Cancel what is not finished."""
        self._closed = True
        self._starter.cancel(self._jobs)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncStream(AsyncIterator[str]):
    """The text of one answer, piece by piece."""

    def __init__(self, batch: AsyncBatchStream) -> None:
        self._batch = batch

    async def __anext__(self) -> str:
        return (await anext(self._batch)).text

    @property
    def output(self) -> Output:
        """The answer: whole after the last piece, before it what there is so far."""
        if not self._batch.outputs:
            raise KvarnError("the stream has not begun: ask for its first piece")
        return self._batch.outputs[0]

    async def aclose(self) -> None:
        """Cancel the answer, if it is not finished."""
        self._batch.close()


class Waiter(Listener):
    """Wakes the task that waits for jobs. Made on the task's event loop."""

    def __init__(self, each_token: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._each_token = each_token

    async def progress(self) -> None:
        await self._moved.wait()
        self._moved.clear()

    async def end_of(self, job: Job) -> None:
        """Return when the job is done. If its request failed, raise the error."""
        while not job.done:
            await self.progress()
        if job.request.error is not None:
            raise job.request.error

    def token(self, job: Job, event: Event) -> None:
        if self._each_token:
            self._wake()

    def ended(self, job: Job) -> None:
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._moved.set)
