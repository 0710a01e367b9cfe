"""The engine's thread. The event loop sends it commands and gets updates; neither waits for the other.

A command is a function that runs between two steps. The thread sleeps while there are no requests. The
updates of one step go to the event loop together. The runner (`kvarn.jobs`) handles jobs and the errors
of single requests. Only an error of the engine itself ends the thread. Then all calls end with an error,
and /health reports the failure.
"""

import asyncio
import logging
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvarn.chats.rules import Constrain
from kvarn.engine.engine import Event
from kvarn.engine.explain import explain
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request
from kvarn.jobs.job import Job, Listener, TokenLogprob
from kvarn.llm import LLM
from kvarn.server.inbox import AnswerPart, Ended, Inbox, Update
from kvarn.server.metrics import Metrics
from kvarn.server.refusal import Refusal
from kvarn.server.timings import Progress, timings_so_far

log = logging.getLogger("kvarn")


def dead() -> Refusal:
    return Refusal(503, "the engine has failed: the server must be started again")


class Submission(NamedTuple):
    """One prompt of a call."""

    prompt: list[int]
    params: SamplingParams
    salt: bytes
    priority: int
    stream: bool
    echo: str = ""  # the answer begins with this text
    constrain: Constrain | None = None  # makes the constraint of a sample
    shown: frozenset[int] = frozenset()  # control tokens that are part of the text
    timed: bool = False  # every part has timings
    watched: bool = False  # the progress of the prompt is reported
    echoed_logprobs: bool = False  # those of the prompt come first in the answer
    pooling: str | None = None  # wants a vector, not an answer
    owner: bytes = b""  # a hash of the API key
    request_id: str = ""


class Audience:
    """Is told on the engine's thread when a submission has ended. This one is nobody."""

    def ended(self, ticket: "Ticket", request: Request) -> None: ...


class Ticket(Listener):
    """Sends the updates of a submission's job to the inbox of its call. Used on the engine's thread."""

    def __init__(self, worker: "Worker", submission: Submission, inbox: Inbox, which: int) -> None:
        self.submission = submission
        self.job: Job | None = None
        self._worker = worker
        self._inbox = inbox
        self._which = which
        self._tokens: dict[int, list[int]] = {}  # of each sample, if the call streams
        self._reported = -1  # prompt tokens

    def token(self, job: Job, event: Event) -> None:
        sample = event.sample
        self._worker.metrics.token(event.gap)
        if self.submission.watched:
            self.report(job.request)
        if self.submission.stream:
            stream = job.texts[sample.index]
            tokens = self._tokens.setdefault(sample.index, [])
            tokens.append(event.sampled.token)
            text, ends = stream.take(), stream.ends  # these and the tokens grow: n_output of them are of this part
            logprobs = job.logprobs.get(sample.index, [])[-1:]
            if sample.n_output == 1:
                text, logprobs = self.submission.echo + text, self._of_prompt(job) + logprobs
            if text or logprobs or sample.finish_reason:
                part = AnswerPart(sample.index, text, logprobs, sample.finish_reason, sample.n_output, ends, tokens)
                timings = timings_so_far(sample) if self.submission.timed else None
                self.put(part._replace(stop=stream.stopped_by, adoption=job.request.adoption, timings=timings))

    def report(self, request: Request) -> None:
        """Report how much of the prompt is computed, if that is more than before: at the start, and after each step."""
        adoption, total, started = request.adoption, len(request.prompt), request.timing.started_at
        if adoption is None or started is None or self._reported == total:
            return
        if self._reported < 0:
            self._reported = adoption.reused
            self.put(Progress(total, adoption.reused, adoption.reused, 0.0, 0.0))
        processed = min(request.samples[0].computed, total)
        if processed > self._reported:
            self._reported = processed
            ms, prompt_ms = 1000 * (time.perf_counter() - started), 1000 * request.timing.prefill_seconds
            self.put(Progress(total, adoption.reused, processed, ms, prompt_ms))

    def ended(self, job: Job) -> None:
        self._worker.close(self)
        self._worker.metrics.finished(job.request)
        self._worker.audience.ended(self, job.request)
        request = job.request
        if not self.submission.stream and request.pool is None:
            for index, completion in enumerate(job.output().completions):
                if completion.finish_reason != "cancelled":
                    text, n = self.submission.echo + completion.text, len(completion.tokens)
                    logprobs = self._of_prompt(job) + completion.logprobs
                    stream, reason = job.texts[index], completion.finish_reason
                    part = AnswerPart(index, text, logprobs, reason, n, stream.ends, completion.tokens)
                    self.put(part._replace(stop=stream.stopped_by, adoption=job.request.adoption))
        n_tokens = sum(sample.n_output for sample in request.samples)
        reasons = tuple(sample.finish_reason or "cancelled" for sample in request.samples)
        end = Ended(n_tokens, explain(request), request.error, reasons, request.timing.first_token_at)
        if request.pool is not None and request.error is None and reasons == ("stop",):
            end = end._replace(vector=request.pool.vector())
        if request.params.prompt_logprobs is not None and not self.submission.echoed_logprobs:
            end = end._replace(prompt_logprobs=job.output().prompt_logprobs)
        self.put(end)

    def _of_prompt(self, job: Job) -> list[TokenLogprob]:
        """The log-probabilities of an echoed prompt. The first token has none."""
        if not self.submission.echoed_logprobs:  # most requests: `output` would copy the prompt
            return []
        found = job.output().prompt_logprobs or []
        return [each or TokenLogprob(job.request.prompt[0], math.nan, ()) for each in found]

    def put(self, update: Update) -> None:
        self._worker.post(self, update)

    def deliver(self, update: Update) -> None:
        """Called on the event loop."""
        self._inbox.put(self._which, update)


class Worker:
    def __init__(self, llm: LLM, metrics: Metrics) -> None:
        self.engine = llm.engine
        self.metrics = metrics
        self.fault: Exception | None = None  # the error that ended the thread
        self.audience = Audience()
        self.open: set[Ticket] = set()  # used on the engine's thread
        self._runner = llm.runner
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: set[Ticket] = set()  # those of them whose progress is reported
        self._outbox: deque[tuple[Ticket, Update]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)

    # -- from the event loop -------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Cancel all open submissions and end the thread."""
        if self._thread.ident is None:  # the server was interrupted before the thread started
            return
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, submission: Submission, inbox: Inbox, which: int = 0) -> Ticket:
        ticket = Ticket(self, submission, inbox, which)
        self._commands.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel before the next step. Does nothing if the submission has ended."""
        self._commands.put(lambda: self._cancel(ticket))

    def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine's thread, before its next step."""
        self._commands.put(work)

    @property
    def share(self) -> int:
        """Submissions of one call that may be queued: a call with many prompts leaves room for others, and a queue that
        is shorter than the call does not refuse it."""
        most = self.engine.config.max_waiting
        return sys.maxsize if most is None else max(most // 2, 1)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def post(self, ticket: Ticket, update: Update) -> None:
        """Send an update after the step. Wake the engine's thread if another thread stepped, because another part of
        the program uses the LLM."""
        self._outbox.append((ticket, update))
        if threading.get_ident() != self._thread.ident:
            self._commands.put(_nothing)

    def close(self, ticket: Ticket) -> None:
        self.open.discard(ticket)
        self._watched.discard(ticket)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.busy:
                    self._step()
                self._send()
        except Exception as error:  # noqa: BLE001 (every call must get an error)
            log.error("the engine has failed: %s: %s", type(error).__name__, error)
            self.fault = error
            for ticket in self.open:
                ticket.put(dead())
            self._send()
            while not self._stopping:
                self._commands.get()()
                self._send()

    def _step(self) -> None:
        stats = self.engine.stats
        before = stats.steps, stats.prefill_tokens + stats.decode_tokens
        self._runner.step()
        for ticket in self._watched:
            if ticket.job is not None:
                ticket.report(ticket.job.request)
        if stats.steps > before[0]:
            self.metrics.stepped(stats.prefill_tokens + stats.decode_tokens - before[1])

    def _obey(self) -> None:
        """Run all commands in the queue. If the engine has no requests, wait for a command first."""
        try:
            if not self.engine.busy:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _add(self, ticket: Ticket) -> None:
        submission = ticket.submission
        self.open.add(ticket)
        try:
            if self.fault is not None:
                raise dead()
            ticket.job = self._job(submission, ticket)
            if submission.watched:
                self._watched.add(ticket)
        except Exception as error:  # noqa: BLE001 (it fails this request only)
            self.open.discard(ticket)
            return ticket.put(error)
        return ticket.put(None)

    def _job(self, submission: Submission, ticket: Ticket) -> Job:
        prompt, salt, priority = submission.prompt, submission.salt, submission.priority
        if submission.pooling is not None:
            return self._runner.embed(prompt, submission.pooling, salt, priority, ticket)
        return self._runner.add(
            prompt,
            submission.params,
            salt,
            priority=priority,
            listener=ticket,
            constrain=submission.constrain,
            shown=submission.shown,
        )

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.job is not None and self.fault is None:
            self._runner.cancel(ticket.job)

    def _stop(self) -> None:
        self._stopping = True
        for ticket in list(self.open):
            self._cancel(ticket)

    def _send(self) -> None:
        if self._outbox and self._loop is not None:
            batch = [self._outbox.popleft() for _ in range(len(self._outbox))]
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the event loop is closed
                self._stopping = True


def _nothing() -> None:
    """A command that only wakes the thread."""


def _deliver(batch: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in batch:
        ticket.deliver(update)
