"""The answers of jobs as asynchronous streams of text, and the event that wakes their tasks.

The requests of a stream begin when its first piece is asked for. A stream that is closed, dropped or
cancelled cancels its requests. Non-goal: stepping the engine (background.py).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from kvarn.chats.answer import content_of
from kvarn.dialect import Delta
from kvarn.engine.engine import Event
from kvarn.errors import KvarnError
from kvarn.jobs.job import Job, Listener, Output
from kvarn.jobs.pieces import Piece, Pieces, Split

Start = Callable[..., Job]  # (listener=...): queues a request


class Starter(Protocol):
    async def start(self, start: Start, waiter: "Waiter") -> Job: ...

    def cancel(self, jobs: Sequence[Job]) -> None: ...


class AsyncBatchStream(AsyncIterator[Piece]):
    """The answers to several prompts, piece by piece, in the order in which they are computed.

    `prepare` gives what starts its requests."""

    def __init__(self, starter: Starter, prepare: Callable[[], Awaitable[Sequence[Start]]]) -> None:
        self._starter = starter
        self._prepare = prepare
        self._pieces: Pieces | None = None
        self.jobs: list[Job] = []
        self.closed = False
        self._reading = False

    async def __anext__(self) -> Piece:
        if self._reading:
            raise KvarnError("this stream is being read by another task: make a stream for each")
        self._reading = True
        try:
            piece = await self._next()
        finally:
            self._reading = False
        if piece is None or self.closed:
            raise StopAsyncIteration
        return piece

    async def _next(self) -> Piece | None:
        if self.closed:
            return None
        try:
            if self._pieces is None:
                self._pieces = await self._start()
            while (piece := self._pieces.take()) is None and not self._pieces.ended and not self.closed:
                await self._waiter.progress()
        except BaseException:
            self.close()
            raise
        return piece

    async def _start(self) -> Pieces:
        self._waiter = Waiter(each_token=True)
        for start in await self._prepare():
            self.jobs.append(await self._starter.start(start, self._waiter))
            if self.closed:  # while it started
                self._starter.cancel(self.jobs)
                break
        return Pieces(self.jobs)

    @property
    def outputs(self) -> list[Output]:
        """The answers: whole after the last piece, before it what there is so far."""
        return [job.output() for job in self.jobs]

    def close(self) -> None:
        """Cancel what is not finished."""
        self.closed = True
        self._starter.cancel(self.jobs)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncParts(AsyncIterator[Delta]):
    """The parts of one answer, as they are computed."""

    def __init__(self, batch: AsyncBatchStream) -> None:
        self._batch = batch
        self._split = Split()

    async def __anext__(self) -> Delta:
        while (part := self._split.take()) is None and not self._split.ended:
            self._split.add(await anext(self._batch, None), self._batch.jobs)
        if part is None or self._batch.closed:
            raise StopAsyncIteration
        return part


class AsyncStream(AsyncIterator[str]):
    """The text of one answer, piece by piece. Reasoning and tool calls are not part of it."""

    def __init__(self, batch: AsyncBatchStream) -> None:
        self._batch = batch
        self._parts = AsyncParts(batch)

    async def __anext__(self) -> str:
        async for part in self._parts:
            if text := content_of(part):
                return text
        raise StopAsyncIteration

    def parts(self) -> AsyncParts:
        """The answer with its reasoning and tool calls, as kvarn.dialect's deltas. A part comes once, here or as
        text."""
        return self._parts

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
