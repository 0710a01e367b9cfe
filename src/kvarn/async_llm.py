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
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from kvarn.arrays import Floats
from kvarn.chats.tools import Tools, tool_use
from kvarn.engine.params import SamplingParams, with_settings
from kvarn.errors import KvarnError
from kvarn.jobs.async_pieces import AsyncBatchStream, AsyncStream, Start, Waiter
from kvarn.jobs.background import Background
from kvarn.jobs.batch import Messages, OneOrEach, is_one_conversation, paired, prompts_of
from kvarn.jobs.job import Job, Output
from kvarn.jobs.pieces import one_answer
from kvarn.llm import LLM
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.text.tokenizer import Prompt

_CLOSED = "this AsyncLLM is closed: make another one"


class AsyncLLM:
    """`model` is an LLM, or what LLM takes, with the same settings. Loading blocks: in a running event loop use
    `await asyncio.to_thread(AsyncLLM, ...)`."""

    def __init__(self, model: LLM | str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise KvarnError(f"the model is loaded already: {', '.join(settings)} cannot be set")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._owns = not isinstance(model, LLM)
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._closed = False
        self._background = Background(self.llm.runner)
        self._stop = weakref.finalize(self, self._background.stop)

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, **settings: Any
    ) -> list[Output]:
        """Continue each prompt (text, or token ids). If one fails, its error is raised and the others are cancelled."""
        pairs = paired(prompts_of(prompts), params, settings)
        return await self._finish([partial(self.llm.start, prompt, chosen) for prompt, chosen in pairs])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> AsyncStream:
        """The text of one answer, piece by piece; `output` of the stream has the rest. Leaving the loop early cancels
        the request."""
        chosen = one_answer(with_settings(params, settings))
        return AsyncStream(self._stream([(prompt, chosen)]))

    def stream_batch(
        self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, **settings: Any
    ) -> AsyncBatchStream:
        """The answers to several prompts, computed together, as `Piece(prompt, sample, text)`."""
        return self._stream(paired(prompts_of(prompts), params, settings))

    @overload
    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, tools: Tools = (), **settings: Any
    ) -> Output: ...
    @overload
    async def chat(
        self, messages: Sequence[Messages], params: OneOrEach = None, *, tools: Tools = (), **settings: Any
    ) -> list[Output]: ...
    async def chat(
        self,
        messages: Any,
        params: Any = None,
        *,
        tools: Tools = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Output | list[Output]:
        """Answer a conversation with the model's chat template: a text, or [{"role": "user", "content": "..."}]. A list
        of conversations gives a list of outputs. The settings are those of LLM.chat."""
        alone = is_one_conversation(messages)
        conversations = [messages] if alone else messages
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        questions = await asyncio.to_thread(
            self.llm.questions, conversations, params, settings, use, chat_template_kwargs
        )
        outputs = await self._finish([partial(self.llm.start_question, question) for question in questions])
        return outputs[0] if alone else outputs

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncStream:
        """The answer to one conversation, piece by piece, as LLM.stream_chat."""
        chosen = one_answer(with_settings(params, settings))
        use = tool_use(tools, tool_choice, parallel_tool_calls)

        async def prepare() -> list[Start]:
            questions = await asyncio.to_thread(self.llm.questions, [messages], chosen, {}, use, chat_template_kwargs)
            return [partial(self.llm.start_question, question) for question in questions]

        return AsyncStream(AsyncBatchStream(self, prepare))

    def _stream(self, pairs: Sequence[tuple[Prompt, SamplingParams]]) -> AsyncBatchStream:
        async def prepare() -> list[Start]:
            return [partial(self.llm.start, prompt, chosen) for prompt, chosen in pairs]

        return AsyncBatchStream(self, prepare)

    async def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str | None = None) -> list[Floats]:
        """The vector of each prompt, as LLM.embed."""
        starts = [partial(self.llm.start_embedding, prompt, pooling) for prompt in prompts_of(prompts)]
        return [job.vector() for job in await self._run(starts)]

    async def _finish(self, starts: Sequence[Start]) -> list[Output]:
        return [job.output() for job in await self._run(starts)]

    async def _run(self, starts: Sequence[Start]) -> list[Job]:
        jobs: list[Job] = []
        waiter = Waiter(each_token=False)
        try:
            for start in starts:
                jobs.append(await self.start(start, waiter))
            for job in jobs:
                await waiter.end_of(job)
        finally:
            self.cancel(jobs)
        return jobs

    def close(self) -> None:
        """Wait for the step under way and stop. Unfinished requests and later calls raise an error. An LLM that was
        given stays open."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        if self._owns:
            self.llm.close()
        else:
            self.llm.runner.abandon(KvarnError(_CLOSED), list(self._jobs))

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    # -- jobs: a request with its text ---------------------------------------------------------------------------

    async def start(self, start: Start, waiter: Waiter) -> Job:
        """Tokenize and queue a prompt on another thread. If this task is cancelled meanwhile, so is the request."""
        if self._closed:
            raise KvarnError(_CLOSED)
        starting = asyncio.get_running_loop().run_in_executor(None, partial(start, listener=waiter))
        try:
            job = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._cancel_started)
            raise
        self._jobs.add(job)
        self._background.wake()
        return job

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Never waits; does nothing for jobs that are done."""
        for job in jobs:
            self.llm.runner.cancel(job)

    def _cancel_started(self, started: "asyncio.Future[Job]") -> None:
        if not started.cancelled() and started.exception() is None:
            self.cancel([started.result()])
