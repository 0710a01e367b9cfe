"""Jobs, and the runner that steps the engine for all of them: the one way from requests to text, offline and served.

The runner has no thread. A thread that waits for a job steps the engine for everybody, unless another one does so
already; then it sleeps until its job has moved, or until it is its turn to step. So any number of threads may share one
runner, and one thread may have several jobs under way. Every token goes to its job, whoever steps.

A step that raises fails one request and no other: the engine finds out which (`Engine.isolate`). A request whose text
cannot be written fails alone as well.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from kvarn.engine.engine import Engine, Event
from kvarn.engine.request import SamplingParams
from kvarn.errors import KvarnError
from kvarn.jobs.job import SILENT, Job, Listener
from kvarn.jobs.turn import Ready, Turn, Uninterrupted
from kvarn.text.stream import TextStream
from kvarn.text.tokenizer import Tokenizer

log = logging.getLogger("kvarn")
Result = TypeVar("Result")


class Runner:
    """All methods may be called from any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, turn: Turn | None = None) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._turn = turn or Turn()
        self._jobs: dict[int, Job] = {}  # under way, by request
        self._dropped: deque[Job] = deque()  # to be cancelled by who has the turn
        self._n_ended = 0  # of the requests that the engine has ended, those that were looked at

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        conversation: Hashable = None,
        priority: int = 0,
        listener: Listener = SILENT,
    ) -> Job:
        """Queue a prompt. It moves when somebody steps: `wait`, `advance`."""
        texts = [TextStream(self._tokenizer, prompt, params.stop) for _ in range(params.n)]

        added: list[Job] = []

        def queue() -> None:
            request = self.engine.add(prompt, params, salt, conversation, priority)
            self._jobs[request.id] = job = Job(request, texts, listener)
            added.append(job)

        try:
            self.call(queue)
            return added[0]
        except BaseException:  # Ctrl-C: nobody will wait for it
            for job in added:
                self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """Free what the job holds: at once, or before the next step if one is under way. Never waits, and is safe for
        a job that is done, in a listener and in a finalizer."""
        if not job.done:
            self._dropped.append(job)
            self._sweep()

    def forget(self, conversation: Hashable, salt: bytes = b"") -> None:
        """Free what is kept of a conversation. Safe for one that is not."""
        self.call(lambda: self.engine.forget(conversation, salt))

    def wait(self, job: Job) -> None:
        """Until the job is done. What made its request fail is raised."""
        self.advance(lambda: job.done)
        if job.request.error is not None:
            raise job.request.error

    def advance(self, ready: Ready) -> None:
        """Until ready() holds: step for everybody, or sleep while another thread does."""
        while not ready():
            self._with_turn(lambda calm: self._step_until(ready, calm), ready)

    def step(self) -> None:
        """One step, for a thread that steps in a loop of its own."""
        self.call(self._step)

    def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` between two steps, before any other thread steps on."""
        results: list[Result] = []
        self._with_turn(lambda calm: results.append(work()))
        return results[0]

    def _with_turn(self, work: Callable[[Uninterrupted], None], ready: Ready | None = None) -> None:
        """Wait for the turn, or until ready() holds; with the turn, do the work."""
        if self._turn.mine:
            raise KvarnError("called from inside a step: a listener may cancel a job, and nothing else of the runner")
        try:
            if self._turn.take(ready):
                with Uninterrupted() as calm:
                    try:
                        work(calm)
                    finally:
                        self._turn.give()
        finally:
            self._turn.give()  # Ctrl-C may have come as it was taken: who keeps the turn stops everybody
            self._sweep()

    # -- with the turn -------------------------------------------------------------------------------------------

    def _step_until(self, ready: Ready, calm: Uninterrupted) -> None:
        while not ready():
            self._step()
            if self._turn.wanted or calm.asked:
                return
            self._turn.tell()

    def _step(self) -> None:
        self._cancel_dropped()
        for event in self._events():
            self._hand(event)
        self._settle()

    def _events(self) -> list[Event]:
        try:
            return self.engine.step()
        except Exception as error:  # noqa: BLE001 (whose fault it is comes out by running them one by one)
            log.error("a step failed: %s: %s", type(error).__name__, error)
            self.engine.isolate(error)
            return []
        except BaseException as error:
            self.engine.isolate(error)
            raise

    def _hand(self, event: Event) -> None:
        job = self._jobs.get(event.sample.request.id)
        if job is None:  # somebody gave it to the engine directly
            return
        try:
            if job.push(event):
                self.engine.finish(event.sample, "stop")
            job.listener.token(job, event)
        except Exception as error:  # noqa: BLE001 (text that cannot be written is this request's fault alone)
            self.engine.fail(job.request, error)

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self.engine.cancel(self._dropped.popleft().request)
        self._settle()

    def _settle(self) -> None:
        """Jobs whose requests have ended are done. Most steps end none: the engine's count says so."""
        n_ended = self.engine.stats.finished
        if n_ended == self._n_ended:
            return
        for job in [job for job in self._jobs.values() if job.request.done]:
            del self._jobs[job.request.id]
            job.done = True
            job.listener.ended(job)
        self._n_ended = n_ended

    def _sweep(self) -> None:
        """Cancel what was dropped too late for who had the turn to see it."""
        if not self._dropped or self._turn.mine:
            return
        with Uninterrupted():
            while self._dropped and self._turn.take_now():
                try:
                    self._cancel_dropped()
                finally:
                    self._turn.give()
