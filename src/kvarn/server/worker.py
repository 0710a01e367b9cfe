"""The engine's thread. HTTP hands it commands and gets updates back; neither waits for the other.

A command is a function that runs between two steps. While nothing is to be done the thread sleeps. One step's updates
cross to the event loop together. One request's fault ends that request; a fault of the engine itself ends them all and
the server says that it is not healthy.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.engine import Event
from kvarn.explain import explain
from kvarn.llm import LLM, Job
from kvarn.metrics import Metrics
from kvarn.request import SamplingParams
from kvarn.server.inbox import Answered, Ended, Inbox, Update
from kvarn.server.refusal import Refusal
from kvarn.text.writer import Writer

log = logging.getLogger("kvarn")


def dead() -> Refusal:
    return Refusal(503, "the engine has failed: the server must be started again")


class Order(NamedTuple):
    """One prompt to be answered."""

    prompt: list[int]
    params: SamplingParams
    salt: bytes
    priority: int
    stream: bool


@dataclass(eq=False)
class Ticket:
    """An order under way. `job` belongs to the engine's thread."""

    order: Order
    inbox: Inbox
    which: int
    job: Job | None = None
    cancelled: bool = False


class Worker:
    def __init__(self, llm: LLM, metrics: Metrics) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.fault: Exception | None = None  # what ended the thread
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # by request
        self._outbox: list[tuple[Ticket, Update]] = []
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

    def submit(self, order: Order, inbox: Inbox, which: int = 0) -> Ticket:
        ticket = Ticket(order, inbox, which)
        self._commands.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Frees what it holds before the next step. Safe to call for one that has ended."""
        self._commands.put(lambda: self._cancel(ticket))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.busy:
                    self._step()
                self._send()
        except Exception as error:  # noqa: BLE001 (whatever it is, nobody may wait for ever)
            log.error("the engine has failed: %s: %s", type(error).__name__, error)
            self.fault = error
            for ticket in self._tickets.values():
                self._put(ticket, dead())
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
        order = ticket.order
        try:
            if self.fault is not None:
                raise dead()
            writers = [Writer(self.llm.tokenizer, order.prompt, order.params.stop) for _ in range(order.params.n)]
            request = self.engine.add(order.prompt, order.params, order.salt, priority=order.priority)
        except Exception as error:  # noqa: BLE001 (a refusal, or a fault that is this request's alone)
            return self._put(ticket, error)
        ticket.job = Job(request, writers)
        self._tickets[request.id] = ticket
        return self._put(ticket, None)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if ticket.job is not None and not ticket.job.done and self.fault is None:
            self.engine.cancel(ticket.job.request)
            self._close(ticket, ticket.job)

    def _stop(self) -> None:
        self._stopping = True
        if self.fault is None:
            for ticket in list(self._tickets.values()):
                self._cancel(ticket)

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:  # noqa: BLE001 (who is to blame is found by running them one by one)
            log.error("a step failed: %s: %s", type(error).__name__, error)
            self.engine.isolate(error)
            events = []
        for event in events:
            try:
                self._take(event)
            except Exception as error:  # noqa: BLE001 (text that cannot be written is this request's fault alone)
                self.engine.fail(event.sample.request, error)
        for ticket in list(self._tickets.values()):
            if ticket.job is not None and ticket.job.done:
                self._close(ticket, ticket.job)

    def _take(self, event: Event) -> None:
        ticket = self._tickets.get(event.sample.request.id)
        if ticket is None or ticket.job is None:
            return
        self._metrics.token(event.gap)
        job, sample = ticket.job, event.sample
        if job.push(event):
            self.engine.finish(sample, "stop")
        if ticket.order.stream:
            text = job.writers[sample.index].take()
            logprobs = job.logprobs.get(sample.index, [])[-1:]
            if text or logprobs or sample.finish_reason:
                self._put(ticket, Answered(sample.index, text, logprobs, sample.finish_reason))

    def _close(self, ticket: Ticket, job: Job) -> None:
        del self._tickets[job.request.id]
        self._metrics.finished(job.request)
        if not ticket.order.stream:
            for index, completion in enumerate(job.output().completions):
                whole = (completion.text, completion.logprobs, completion.finish_reason)
                self._put(ticket, Answered(index, *whole))
        n_tokens = sum(len(sample.output) for sample in job.request.samples)
        self._put(ticket, Ended(n_tokens, explain(job.request), job.request.error))

    def _put(self, ticket: Ticket, update: Update) -> None:
        if not ticket.cancelled or isinstance(update, Ended):
            self._outbox.append((ticket, update))

    def _send(self) -> None:
        if self._outbox and self._loop is not None:
            batch, self._outbox = self._outbox, []
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                self._stopping = True


def _deliver(batch: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in batch:
        ticket.inbox.put(ticket.which, update)
