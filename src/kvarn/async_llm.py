"""The Python API for asyncio: `LLM` whose answers are awaited.

    from kvarn import AsyncLLM
    llm = AsyncLLM("smollm2", cache="paged")
    output, = await llm.generate("The quick brown fox")
    async for piece in llm.stream("Once upon a time"):
        print(piece, end="")

All unfinished requests are computed together on a thread of their own, so the event loop is never
blocked. A task that is cancelled, or a stream that is left early, frees what it held. Several event
loops and threads may share one AsyncLLM.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvarn.engine.engine import Event
from kvarn.engine.request import SamplingParams, with_settings
from kvarn.jobs.background import Background
from kvarn.jobs.job import Job, Listener, Output
from kvarn.llm import LLM, paired
from kvarn.text.tokenizer import Prompt


class AsyncLLM:
    """`model` is an LLM, or what LLM takes, with the same settings. Loading blocks: in a running event loop use
    `await asyncio.to_thread(AsyncLLM, ...)`."""

    def __init__(self, model: LLM | str | Path = "smollm2", **settings: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._background = Background(self.llm.runner)
        self._stop = weakref.finalize(self, self._background.stop)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Output]:
        """Continue each prompt (text, or token ids). If one fails, its error is raised and the others are cancelled."""
        jobs: list[Job] = []
        try:
            waits = []
            for prompt, each in paired(prompts, params, settings):
                waiter = _Waiter(each_token=False)
                jobs.append(await self._start(prompt, each, waiter))
                waits.append(waiter)
            for job, waiter in zip(jobs, waits, strict=True):
                await waiter.end_of(job)
        finally:
            for job in jobs:
                self.llm.runner.cancel(job)
        return [job.output() for job in jobs]

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> AsyncIterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early cancels the request."""
        waiter = _Waiter(each_token=True)
        job = await self._start(prompt, with_settings(params, settings), waiter)
        text, done = job.texts[0], False
        try:
            while not done:
                await waiter.progress()
                done = job.done  # read before `take`: no text is added after it is true
                if piece := text.take():
                    yield piece
            await waiter.end_of(job)
        finally:
            self.llm.runner.cancel(job)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **settings: Any
    ) -> Output:
        """Answer a conversation, [{"role": "user", "content": "..."}], with the model's chat template."""
        return (await self.generate(await asyncio.to_thread(self.llm.render, messages), params, **settings))[0]

    def close(self) -> None:
        """Wait for the step under way and stop. Unfinished requests and later calls raise an error."""
        self._stop()
        self.llm.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    async def _start(self, prompt: Prompt, params: SamplingParams, waiter: "_Waiter") -> Job:
        """Tokenize and queue a prompt on another thread. If this task is cancelled meanwhile, so is the request."""
        work = partial(self.llm.start, prompt, params, listener=waiter)
        starting = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            job = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._cancel)
            raise
        self._background.wake()
        return job

    def _cancel(self, started: "asyncio.Future[Job]") -> None:
        if not started.cancelled() and started.exception() is None:
            self.llm.runner.cancel(started.result())


class _Waiter(Listener):
    """Wakes the task that waits for a job. Made on the task's event loop."""

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
