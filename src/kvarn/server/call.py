"""The life of one call for text: submissions to the engine, updates back, an answer, whole or streamed.

However it ends (answered, refused, the client gone or not reading), nothing of it stays: its submissions are cancelled,
which frees their blocks before the next step.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvarn.engine.explain import Explanation, to_json
from kvarn.errors import KvarnError, PromptTooLong, QueueFull
from kvarn.jobs.job import TokenLogprob
from kvarn.server.access import Caller
from kvarn.server.inbox import AnswerPart, Ended, Inbox
from kvarn.server.protocol import Call
from kvarn.server.records import Records
from kvarn.server.refusal import Refusal
from kvarn.server.reply import Reply, usage_of
from kvarn.server.worker import Submission, Worker
from kvarn.text.tokenizer import Tokenizer

log = logging.getLogger("kvarn")


class Generation:
    """One call under way."""

    def __init__(
        self, worker: Worker, tokenizer: Tokenizer, reply: Reply, call: Call, caller: Caller, records: Records
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._reply = reply
        self._call = call
        self._caller = caller
        self._records = records
        self._ended: dict[int, Explanation] = {}
        self._explained = False
        self._n_tokens = 0

    async def start(self, submissions: Sequence[Submission]) -> None:
        """All submissions are queued, or all are taken back and the refusal is raised."""
        self._inbox = Inbox(len(submissions))
        self._tickets = [self._worker.submit(submission, self._inbox, i) for i, submission in enumerate(submissions)]
        try:
            await self._inbox.accepted()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """What was under way ends, and is explained to whoever asks for it later."""
        self._inbox.leave(self._left_behind)
        for ticket in self._tickets:
            self._worker.cancel(ticket)
        self._explain_late()

    def _left_behind(self, which: int, update: Ended) -> None:
        self._ended[which] = update.explanation
        self._explain_late()

    def _explain_late(self) -> None:
        if not self._explained and len(self._ended) == len(self._tickets):
            self._recorded()

    async def whole(self) -> dict[str, Any]:
        choices = {}
        async for index, part in self._answers():
            entries = self._entries(part)
            choices[index] = self._reply.choice(index, part.text, entries, part.finish_reason or "stop")
        return self._reply.whole([choices[index] for index in sorted(choices)], self._usage(), self._recorded())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """A chunk per piece. The explanation stands in the last one, that of the usage if it was asked for."""
        opened: set[int] = set()
        last: list[dict[str, Any]] = []  # a chunk that ends a choice and could be the last
        async for index, part in self._answers():
            for held in last:
                yield self._reply.chunk([held])
            if self._call.chat and index not in opened:
                yield self._reply.chunk([self._reply.opening(index)])
            opened.add(index)
            last = [self._reply.delta(index, part.text, self._entries(part), part.finish_reason)]
            if part.finish_reason is None or self._call.include_usage:
                yield self._reply.chunk(last)
                last = []
        yield self._reply.chunk(last, self._usage() if self._call.include_usage else None, self._recorded())

    async def _answers(self) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Updates with the index of their choice, until every submission has ended."""
        while len(self._ended) < len(self._tickets):
            taken = await self._inbox.take()
            for which, update in taken:  # all ends first: the caller may leave at any piece
                if isinstance(update, Ended) and update.error is None:
                    self._ended[which] = update.explanation
                    self._n_tokens += update.n_tokens
            for which, update in taken:
                if isinstance(update, AnswerPart):
                    yield which * self._call.n + update.sample, update
                elif update.error is not None:
                    raise update.error

    def _entries(self, part: AnswerPart) -> list[TokenLogprob] | None:
        return None if self._call.settings["logprobs"] is None else part.logprobs

    def _usage(self) -> dict[str, Any]:
        return usage_of(list(self._ended.values()), self._n_tokens)

    def _recorded(self) -> dict[str, Any]:
        """The explanation, kept for whoever made the call."""
        self._explained = True
        each = [to_json(self._quotable(self._ended[i]), self._spell) for i in sorted(self._ended)]
        head = {"id": self._reply.id, "created": self._reply.created, "model": self._reply.model}
        explained = {**head, **each[0]} if len(each) == 1 else {**head, "prompts": each}
        self._records.add(self._reply.id, self._caller.owner, explained)
        return explained

    def _quotable(self, found: Explanation) -> Explanation:
        if self._caller.quotes or found.limit is None:
            return found
        return replace(found, limit=found.limit._replace(theirs=None, onward=()))

    def _spell(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, special=True)


class Answer(Response):
    """The response to a call: waits, streams, and watches whether the caller is still there."""

    def __init__(self, generation: Generation, stream: bool, reader_seconds: float) -> None:
        self._generation = generation
        self._stream = stream
        self._reader_seconds = reader_seconds
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._events(send) if self._stream else self._once(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            self._generation.cancel()
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _once(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = JSONResponse(await self._generation.whole())
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            response = fault(error).response()
        async with asyncio.timeout(self._reader_seconds):
            await response(scope, receive, send)

    async def _events(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._generation.chunks():
                await self._event(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            await self._event(send, "[DONE]")
        except TimeoutError:  # its buffers are full and it takes nothing: let go
            log.warning("a reader took nothing for %g s: its request is cancelled", self._reader_seconds)
            return
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            await self._event(send, json.dumps(fault(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, data: str) -> None:
        message = {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        # Not wait_for: before Python 3.12 it loses a cancellation that comes as the send ends, and it costs a task.
        async with asyncio.timeout(self._reader_seconds):
            await send(message)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def fault(error: Exception, retry_after: int = 1) -> Refusal:
    """What a caller is told of an error in the engine."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, KvarnError):
        return Refusal(400, str(error), code="context_length_exceeded" if isinstance(error, PromptTooLong) else None)
    log.error("a request failed: %s: %s", type(error).__name__, error)
    return Refusal(500, f"the request failed through a fault of the server ({type(error).__name__})")
