"""The runner steps the engine for all jobs, in the Python API and in the server.

The runner has no thread of its own. A thread that waits for a job steps the engine for all jobs. If
another thread already steps, it sleeps until its job has progressed or until it gets the turn. Any
number of threads may share one runner, and one thread may have several jobs. Every token goes to its
job, no matter which thread steps.

A step that raises fails only one request; `Engine.isolate` finds out which one. A request whose text
cannot be decoded also fails alone. After an error or an interrupt at any other line, the engine starts
all unfinished requests again. A request whose text then lacks a token fails.

A forked process has none of the engine's threads, so all calls raise an error there. When the
interpreter exits, the step under way is finished first and no other is begun.
"""

import atexit
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from kvarn.chats.answer import Reader
from kvarn.engine.constraint import FREE, Constraint
from kvarn.engine.engine import Engine, Event
from kvarn.engine.params import SamplingParams
from kvarn.engine.pooling import Pool
from kvarn.engine.request import Begun, Request
from kvarn.errors import KvarnError
from kvarn.jobs.job import SILENT, Job, Listener
from kvarn.jobs.turn import Ready, Turn, Uninterrupted
from kvarn.structured import Compiler
from kvarn.text.stream import TextStream
from kvarn.text.tokenizer import Tokenizer

_open: weakref.WeakSet["Runner"] = weakref.WeakSet()
log = logging.getLogger("kvarn")
Result = TypeVar("Result")


class Runner:
    """All methods may be called from any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, turn: Turn | None = None) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._turn = turn or Turn()
        self._jobs: dict[int, Job] = {}  # unfinished jobs, by request id
        self._dropped: deque[Job] = deque()  # jobs that the thread with the turn must cancel
        self._n_ended = 0  # EngineStats.finished at the last `_settle`
        self._process = os.getpid()
        self._closed = False
        _open.add(self)

    @cached_property
    def compiler(self) -> Compiler:
        return Compiler(self._tokenizer, self._tokenizer.eos_ids)

    @property
    def busy(self) -> bool:
        """Whether there are unfinished jobs."""
        return bool(self._jobs)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        conversation: Hashable = None,
        priority: int = 0,
        listener: Listener = SILENT,
        text: str | None = None,
        constrain: Callable[[int], Constraint] | None = None,
        shown: frozenset[int] = frozenset(),
        reader: Callable[[], Reader] | None = None,
        begun: Begun | None = None,
    ) -> Job:
        """Queue a prompt, whose text is `text` if it has one. It is computed when a thread calls `wait`, `advance` or
        `step`. `constrain(k)` makes the constraint of sample k; without it, answers follow the structure of `params`,
        which is compiled here, on the caller's thread. `shown`: control tokens that are part of the answers' text.
        `reader` makes the reader of an answer's parts. An answer that has `begun` goes on; its stream has the new text
        only."""
        if constrain is None and (structure := params.structure) is not None:
            compiled = self.compiler.compile(structure)
            constrain = lambda k: compiled.start()  # noqa: E731
        stop = params.stop if constrain is None else ()  # a structure says where it ends
        texts = [TextStream(self._tokenizer, prompt, stop, shown) for _ in range(params.n)]
        for each in begun.tokens if begun else ():
            texts[0].push(each)
        texts[0].take()
        n_taken = len(begun.tokens) if begun else 0
        constrained = constrain or (lambda k: FREE)
        return self._queue(
            lambda request: Job(request, texts, listener, text, reader, n_taken=n_taken),
            lambda own: self.engine.add(prompt, params, salt, conversation, priority, constrained, own, begun=begun),
        )

    def embed(
        self, prompt: Sequence[int], pooling: str, salt: bytes = b"", priority: int = 0, listener: Listener = SILENT
    ) -> Job:
        """Queue a prompt for its hidden states: `request.pool` of the job has their vector at the end."""
        pool, params = Pool(pooling), SamplingParams(max_tokens=1)
        return self._queue(
            lambda request: Job(request, [], listener),
            lambda own: self.engine.add(prompt, params, salt, priority=priority, announce=own, pool=pool),
        )

    def _queue(self, make: Callable[[Request], Job], add: Callable[[Callable[[Request], None]], object]) -> Job:
        added: list[Job] = []

        def own(request: Request) -> None:
            added.append(make(request))
            self._jobs[request.id] = added[0]

        try:
            self.call(lambda: add(own))
            return added[0]
        except BaseException:  # Ctrl-C: the caller gets no job, so cancel it
            for job in added:
                self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """End the job and free its blocks: now, or before the next step if a step is running.

        Never waits. Safe for a job that is done, in a listener and in a finalizer."""
        if not job.done and os.getpid() == self._process:
            self._dropped.append(job)
            self._sweep()

    def forget(self, conversation: Hashable, salt: bytes = b"") -> None:
        """Free the parked sequence of the conversation, if it has one."""
        self.call(lambda: self.engine.forget(conversation, salt))

    def wait(self, job: Job) -> None:
        """Return when the job is done. If its request failed, raise the error."""
        self.advance(lambda: job.done)
        if job.request.error is not None:
            raise job.request.error

    def advance(self, ready: Ready) -> None:
        """Return when ready() is true. Until then, step, or sleep while another thread steps."""
        while not ready():
            self._with_turn(lambda calm: self._step_until(ready, calm), ready)

    def step(self) -> None:
        """Run one step, for a thread that has its own loop."""
        self.call(self._step)

    def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` between two steps. Calls come before other threads' steps."""
        results: list[Result] = []
        self._with_turn(lambda calm: results.append(work()))
        return results[0]

    def abandon(self, error: Exception, jobs: Iterable[Job] | None = None) -> None:
        """End these jobs, or all jobs, with this error."""
        self.call(lambda: self._fail(list(self._jobs.values() if jobs is None else jobs), error))

    def close(self) -> None:
        """Wait for the step under way, end all jobs with an error, and refuse all later calls. Tiers get everything
        that is resident."""
        if not self._closed and os.getpid() == self._process:
            self.call(self._close)

    def halt(self) -> None:
        """Wait for the step under way and keep the turn for ever. For the exit of the interpreter."""
        if not self._turn.mine and os.getpid() == self._process:
            self._turn.take()
            self._drain()

    def drain(self) -> str:
        """Hand everything that is resident to the tiers, between two steps. Returns what was done, in words."""
        return self.call(self._drain)

    def _with_turn(self, work: Callable[[Uninterrupted], None], ready: Ready | None = None) -> None:
        """Wait for the turn, or until ready() is true. With the turn, do the work."""
        if self._turn.mine:
            raise KvarnError("the model is in the middle of a step: a logits processor or a listener may not call it")
        if os.getpid() != self._process:
            raise KvarnError(
                "this process was forked after the model was loaded, and the threads that compute did not come "
                "along: load the model in the new process, or use the `spawn` start method of multiprocessing"
            )
        if self._closed and ready is None:
            raise KvarnError("this LLM is closed: load the model again")
        try:
            if self._turn.take(ready):
                with Uninterrupted() as calm:
                    self._use_turn(lambda: work(calm))
        finally:
            self._turn.give()  # Ctrl-C may have come just after `take`: a kept turn would block all threads
            self._sweep()

    # -- with the turn -------------------------------------------------------------------------------------------

    def _step_until(self, ready: Ready, calm: Uninterrupted) -> None:
        while not ready():
            self._step()
            if self._turn.wanted or calm.asked:
                return
            self._turn.tell()

    def _step(self) -> None:
        try:
            self._cancel_dropped()
            for event in self.engine.step():
                self._hand(event)
            self._settle()
        except Exception as error:  # noqa: BLE001 (`isolate` finds the request that failed)
            log.error("a step failed: %s: %s", type(error).__name__, error)
            self._mend(error)

    def _use_turn(self, work: Callable[[], None]) -> None:
        """Do the work and give the turn away. If the work fails or is interrupted at any line, repair the state."""
        try:
            work()
        except KvarnError:  # a refusal, which changes nothing
            raise
        except BaseException as error:
            self._mend(error)
            raise
        finally:
            self._turn.give()

    def _mend(self, error: BaseException) -> None:
        try:
            self.engine.isolate(error)
        finally:
            lost = error if isinstance(error, Exception) else KvarnError("interrupted, and a token was lost: ask again")
            for job in list(self._jobs.values()):
                if not job.complete:
                    self.engine.fail(job.request, lost)
            self._n_ended = -1
            self._settle()

    def _hand(self, event: Event) -> None:
        job = self._jobs.get(event.sample.request.id)
        if job is None:  # the request was added to the engine directly
            return
        try:
            if job.push(event):
                self.engine.finish(event.sample, "stop")
            job.listener.token(job, event)
        except Exception as error:  # noqa: BLE001 (only this request fails)
            self.engine.fail(job.request, error)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            if not job.done:
                self.engine.fail(job.request, error)
        self._settle()

    def _close(self) -> None:
        self._closed = True
        self._fail(list(self._jobs.values()), KvarnError("this LLM was closed before the answer was complete"))
        self._drain()

    def _drain(self) -> str:
        try:
            return self.engine.tiers.drain()
        except Exception as error:  # noqa: BLE001 (a device that failed must not keep the process from its end)
            log.error("the cache could not be stored: %s: %s", type(error).__name__, error)
            return ""

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self.engine.cancel(self._dropped[0].request)
            self._dropped.popleft()
        self._settle()

    def _settle(self) -> None:
        """Mark the jobs of finished requests as done. The engine's count tells whether there are any."""
        n_ended = self.engine.stats.finished
        if n_ended == self._n_ended:
            return
        for job in [job for job in self._jobs.values() if job.request.done]:
            job.done = True
            job.listener.ended(job)
            del self._jobs[job.request.id]
        self._n_ended = n_ended

    def _sweep(self) -> None:
        """Cancel the jobs that were dropped after the thread with the turn last looked."""
        if not self._dropped or self._turn.mine:
            return
        with Uninterrupted():
            while self._dropped and self._turn.take_now():
                self._use_turn(self._cancel_dropped)


@atexit.register
def _halt_all() -> None:
    """Python ends daemon threads when they next ask for its lock. In the middle of a step, that would abort the
    process."""
    for runner in list(_open):
        runner.halt()
