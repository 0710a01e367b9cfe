"""The engine's thread. HTTP hands it commands and gets updates back; neither waits for the other.

A command is a function that runs between two steps. While nothing is to be done the thread sleeps. One step's updates
cross to the event loop together. Jobs and faults are the runner's (`kvarn.jobs`); only a fault of the engine itself
ends the thread: all calls end with it, and the server says that it is not healthy.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvarn.engine.engine import Event
from kvarn.engine.explain import explain
from kvarn.engine.request import SamplingParams
from kvarn.jobs.job import Job, Listener
from kvarn.llm import LLM
from kvarn.server.inbox import AnswerPart, Ended, Inbox, Update
from kvarn.server.metrics import Metrics
from kvarn.server.refusal import Refusal

log = logging.getLogger("kvarn")


def dead() -> Refusal:
    return Refusal(503, "the engine has failed: the server must be started again")


class Submission(NamedTuple):
    """One prompt to be answered."""

    prompt: list[int]
    params: SamplingParams
    salt: bytes
    priority: int
    stream: bool


class Ticket(Listener):
    """A submission under way: updates on its job go to its place in an inbox. Used on the engine's thread."""

    def __init__(self, worker: "Worker", submission: Submission, inbox: Inbox, which: int) -> None:
        self.submission = submission
        self.job: Job | None = None
        self._worker = worker
        self._inbox = inbox
        self._which = which

    def token(self, job: Job, event: Event) -> None:
        sample = event.sample
        self._worker.metrics.token(event.gap)
        if self.submission.stream:
            text = job.texts[sample.index].take()
            logprobs = job.logprobs.get(sample.index, [])[-1:]
            if text or logprobs or sample.finish_reason:
                self.put(AnswerPart(sample.index, text, logprobs, sample.finish_reason))

    def ended(self, job: Job) -> None:
        self._worker.close(self)
        self._worker.metrics.finished(job.request)
        if not self.submission.stream:
            for index, completion in enumerate(job.output().completions):
                if completion.finish_reason != "cancelled":
                    self.put(AnswerPart(index, completion.text, completion.logprobs, completion.finish_reason))
        n_tokens = sum(sample.n_output for sample in job.request.samples)
        self.put(Ended(n_tokens, explain(job.request), job.request.error))

    def put(self, update: Update) -> None:
        self._worker.post(self, update)

    def deliver(self, update: Update) -> None:
        """On the event loop."""
        self._inbox.put(self._which, update)


class Worker:
    def __init__(self, llm: LLM, metrics: Metrics) -> None:
        self.engine = llm.engine
        self.metrics = metrics
        self.fault: Exception | None = None  # what ended the thread
        self._runner = llm.runner
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._outbox: deque[tuple[Ticket, Update]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)

    # -- from the event loop -------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is left and end the thread."""
        if self._thread.ident is None:  # interrupted before it was started
            return
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, submission: Submission, inbox: Inbox, which: int = 0) -> Ticket:
        ticket = Ticket(self, submission, inbox, which)
        self._commands.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Frees what it holds before the next step. Safe to call for one that has ended."""
        self._commands.put(lambda: self._cancel(ticket))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def post(self, ticket: Ticket, update: Update) -> None:
        """Send an update after the step. If another thread stepped (the LLM is used beside the server), wake ours."""
        self._outbox.append((ticket, update))
        if threading.get_ident() != self._thread.ident:
            self._commands.put(_nothing)

    def close(self, ticket: Ticket) -> None:
        self._open.discard(ticket)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.busy:
                    self._runner.step()
                self._send()
        except Exception as error:  # noqa: BLE001 (no caller may be left waiting)
            log.error("the engine has failed: %s: %s", type(error).__name__, error)
            self.fault = error
            for ticket in self._open:
                ticket.put(dead())
            self._send()
            while not self._stopping:
                self._commands.get()()
                self._send()

    def _obey(self) -> None:
        """All commands that are there; with nothing else to do, the next one, however long it takes to come."""
        try:
            if not self.engine.busy:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _add(self, ticket: Ticket) -> None:
        submission = ticket.submission
        self._open.add(ticket)
        try:
            if self.fault is not None:
                raise dead()
            ticket.job = self._runner.add(
                submission.prompt, submission.params, submission.salt, priority=submission.priority, listener=ticket
            )
        except Exception as error:  # noqa: BLE001 (a refusal, or a fault that is this request's alone)
            self._open.discard(ticket)
            return ticket.put(error)
        return ticket.put(None)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.job is not None and self.fault is None:
            self._runner.cancel(ticket.job)

    def _stop(self) -> None:
        self._stopping = True
        for ticket in list(self._open):
            self._cancel(ticket)

    def _send(self) -> None:
        if self._outbox and self._loop is not None:
            batch = [self._outbox.popleft() for _ in range(len(self._outbox))]
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: there is no one to send to
                self._stopping = True


def _nothing() -> None:
    """A command that only wakes the thread."""


def _deliver(batch: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in batch:
        ticket.deliver(update)
