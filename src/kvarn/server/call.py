"""One request for text over HTTP: submissions to the engine, updates from it, and an answer, whole or streamed.

A call can end with an answer or a refusal, or because the client disconnects or stops reading. In each
case its submissions are cancelled, which frees their blocks before the next step.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvarn.chats.answer import Reader
from kvarn.engine.explain import Explanation
from kvarn.jobs.job import TokenLogprob
from kvarn.server.causes import differs
from kvarn.server.explaining import Explaining
from kvarn.server.faults import fault, refuse
from kvarn.server.ignored import Ignored, headers, list_of
from kvarn.server.inbox import AnswerPart, Ended, Inbox
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Reply
from kvarn.server.request_log import Entry, entry_of
from kvarn.server.timings import Progress
from kvarn.server.worker import Submission, Ticket, Worker

log = logging.getLogger("kvarn")

MOST_AT_ONCE = 128  # submissions of one call
SILENCE = 15.0  # seconds without a frame, after which a stream gets a comment
COMMENT = b": the answer is not ready yet\n\n"  # of server-sent events: clients skip it, and proxies see that we live


class Generation:
    """`entry`: the request's entry in the log, which the generation holds until the engine has reported the end.
    `reader` makes the reader of an answer. `ignored`: what was accepted without effect. `notes`: what the answer says
    besides."""

    def __init__(
        self,
        worker: Worker,
        reply: Reply,
        call: Call,
        entry: Entry,
        reader: Callable[[], Reader],
        ignored: list[Ignored],
        explaining: Explaining,
        notes: Mapping[str, Any],
    ) -> None:
        self._worker = worker
        self.reply = reply
        self._call = call
        self._explaining = explaining
        self._entry = entry
        self._answers: defaultdict[int, Reader] = defaultdict(reader)  # by choice
        self._held: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self._ignored = ignored
        self._notes = notes
        self._n_reasoning = 0
        self._ended: dict[int, Ended] = {}
        self._explained = False
        self._recording: asyncio.Task[Any] | None = None
        self._holding = False
        self._n_tokens = 0
        self._n_prompt_tokens = 0
        self._n_sampled: defaultdict[int, int] = defaultdict(int)  # tokens of each choice so far

    async def start(self, submissions: Sequence[Submission]) -> None:
        """Queue all submissions. If one is refused, cancel all of them and raise the refusal."""
        self._at_once = min(MOST_AT_ONCE, self._worker.share)
        self._inbox = Inbox(min(len(submissions), self._at_once))
        self._n_prompt_tokens = sum(len(submission.prompt) for submission in submissions)
        self._tickets: list[Ticket] = []
        self._waiting = deque(submissions)
        self._submit()
        try:
            await self._inbox.accepted()
        except BaseException:
            self.cancel()
            raise
        self._entry.hold()
        self._holding = True

    def _submit(self) -> None:
        while self._waiting and len(self._tickets) - len(self._ended) < self._at_once:
            submission = self._waiting.popleft()
            self._tickets.append(self._worker.submit(submission, self._inbox, len(self._tickets)))

    def cancel(self) -> None:
        """Cancel all submissions. Their explanation is recorded when all of them have ended."""
        self._waiting.clear()
        self._inbox.leave(self._on_end)
        for ticket in self._tickets:
            self._worker.cancel(ticket)
        self._record_if_ended()
        if self._worker.fault is not None:  # then they never end
            self._release()

    def _on_end(self, which: int, update: Ended) -> None:
        self._note_end(which, update)
        self._record_if_ended()

    def _note_end(self, which: int, update: Ended) -> None:
        if which not in self._ended:
            self._ended[which] = update
            self._n_tokens += update.n_tokens
            self._entry.ended(update)

    def _record_if_ended(self) -> None:
        """Also if nobody waits for the answer any more."""
        if self._recording is not None or self._explained or len(self._ended) < len(self._tickets):
            return
        found = self._explanations()
        if any(map(differs, found)):
            self._recording = asyncio.ensure_future(self._record())
        else:
            self._store(found)

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            self._entry.release()

    @property
    def headers(self) -> dict[str, str]:
        return {**self.reply.headers, **headers(self._ignored)}

    async def whole(self) -> Any:
        choices = {index: self._part(index, part) async for index, part in self._parts() if part is not None}
        return self.reply.whole([choices[index] for index in sorted(choices)], await self._end())

    async def frames(self) -> AsyncIterator[bytes]:
        """Of a stream. An error ends it."""
        for frame in self.reply.begin(self._n_prompt_tokens):
            yield frame
        async for index, part in self._parts():
            if part is None:
                if self.reply.media_type == SSE:
                    yield COMMENT
                continue
            for frame in self.reply.part(self._part(index, part)):
                yield frame
        for frame in self.reply.end(await self._end()):
            yield frame

    def _part(self, index: int, part: AnswerPart | Progress) -> Part:
        answer = self._answers[index]
        if isinstance(part, Progress):
            timings = part.timings if self._call.timed else None
            return Part(index, [], answer, [], 0, None, None, None, timings=timings, progress=part)
        deltas, finish = answer.push(part.text), part.finish_reason
        if finish:
            deltas += answer.finish()
            self._n_reasoning += answer.n_reasoning(part.ends)
            finish = answer.finish_reason(finish)
        tokens = list(part.tokens[self._n_sampled[index] : part.n_tokens])
        self._n_sampled[index] = part.n_tokens
        return Part(
            index,
            deltas,
            answer,
            tokens,
            part.n_tokens,
            self._entries(index, part),
            finish,
            part.stop,
            adoption=part.adoption,
            timings=part.timings,
        )

    async def _parts(self) -> AsyncIterator[tuple[int, AnswerPart | Progress | None]]:
        """Updates with the index of their choice, until every submission has ended. None: there was none for some
        time."""
        while len(self._ended) < len(self._tickets):
            updates = await self._inbox.take(SILENCE)
            if not updates:
                yield 0, None
            for which, update in updates:  # note all ends first: the client may disconnect at any piece
                if isinstance(update, Ended):
                    self._note_end(which, update)
            self._submit()
            for which, update in updates:
                if isinstance(update, AnswerPart):
                    index = which * self._call.n + update.sample
                    self._entry.answered(index, update.text)
                    yield index, update
                elif isinstance(update, Progress):
                    yield which * self._call.n, update
                elif update.error is not None:
                    raise update.error

    def _entries(self, index: int, part: AnswerPart) -> list[TokenLogprob] | None:
        """Without those of reasoning that the answer does not have."""
        if self._call.settings["logprobs"] is None:
            return None
        if self._call.talk is None or (self._call.talk.reasoning and not self._call.text_logprobs):
            return list(part.logprobs)
        answer = self._answers[index]
        if not self._call.stream:
            return list(part.logprobs[answer.n_reasoning(part.ends) :])
        held = self._held[index]  # until it is known what they belong to
        held += part.logprobs
        if not (answer.begun or part.finish_reason):
            return []
        first = part.n_tokens - len(held)
        known = held[max(answer.n_reasoning(part.ends[: part.n_tokens]) - first, 0) :]
        held.clear()
        return known

    async def _end(self) -> End:
        told = {**await self._record(), **self._notes}
        if self._ignored:
            told["ignored"] = list_of(self._ignored)
        if errors := [each.error for _, each in sorted(self._answers.items()) if each.error]:
            told["tool_parse_error"] = "; ".join(errors)
        ended = [self._ended[i] for i in sorted(self._ended)]
        return End(
            [each.explanation for each in ended],
            self._n_tokens,
            self._n_reasoning,
            told,
            [each.vector for each in ended if each.vector is not None],
            [each.prompt_logprobs for each in ended if each.prompt_logprobs is not None],
        )

    async def _record(self) -> dict[str, Any]:
        prompts = [(each, self._tickets[i].submission.prompt) for i, each in enumerate(self._explanations())]
        return self._store(await self._explaining.causes(prompts))

    def _explanations(self) -> list[Explanation]:
        """Those that are told: many embeddings would fill the answer and the records."""
        return [self._ended[i].explanation for i in sorted(self._ended)[:MOST_AT_ONCE]]

    def _store(self, found: Sequence[Explanation]) -> dict[str, Any]:
        """Store the explanation for the caller's key, and return it."""
        self._explained = True
        head = {
            "id": self.reply.id,
            "request_id": self._entry.id,
            "created": self.reply.created,
            "model": self.reply.model,
        }
        answer = self._answers.get(0) if self._call.n == 1 else None
        told = self._explaining.store(head, found, answer, self._n_tokens)
        self._release()
        return told


class Answer(Response):
    """The response to a call, whole or streamed. It cancels the call when the client disconnects."""

    def __init__(self, generation: Generation, stream: bool, reader_seconds: float) -> None:
        self._generation = generation
        self._stream = stream
        self._reader_seconds = reader_seconds
        self._begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._streamed(scope, send) if self._stream else self._once(scope, receive, send)
        answering = asyncio.ensure_future(answer)
        disconnected = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait({answering, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            self._generation.cancel()
            for task in (answering, disconnected):
                task.cancel()
            await asyncio.gather(answering, disconnected, return_exceptions=True)

    async def _once(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = JSONResponse(await self._generation.whole(), headers=self._generation.headers)
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            response = refuse(scope, error, self._generation.reply.error)
        try:
            async with asyncio.timeout(self._reader_seconds):
                await response(scope, receive, send)
        except TimeoutError:
            self._not_read(scope)

    async def _streamed(self, scope: Scope, send: Send) -> None:
        """The head goes with the first frame. Until then the connection can find out whether its client has gone."""
        try:
            async for frame in self._generation.frames():
                await self._frame(send, frame)
        except TimeoutError:  # the socket's buffers are full and the client does not read
            self._not_read(scope)
            return
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            refusal, entry = fault(error), entry_of(scope)
            entry.refused(refusal)
            for frame in self._generation.reply.failed(refusal, entry.id):
                await self._frame(send, frame)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _not_read(self, scope: Scope) -> None:
        log.warning("a client did not read for %g s: its request is cancelled", self._reader_seconds)
        entry_of(scope).error = f"the client did not read for {self._reader_seconds:g} s"

    async def _frame(self, send: Send, frame: bytes) -> None:
        if not self._begun:
            self._begun = True
            head = {"content-type": self._generation.reply.media_type, "cache-control": "no-store"}
            named = [(name.encode(), text.encode()) for name, text in (head | self._generation.headers).items()]
            await send({"type": "http.response.start", "status": 200, "headers": named})
        message = {"type": "http.response.body", "body": frame, "more_body": True}
        # Not wait_for: it makes a task, and before Python 3.12 it loses a cancellation that comes as the send ends.
        async with asyncio.timeout(self._reader_seconds):
            await send(message)


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
