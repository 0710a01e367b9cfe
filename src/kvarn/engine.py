"""The engine: continuous batching over one model and one cache. It speaks token ids.

    schedule -> reserve (or preempt, or wait) -> copies -> tables -> run the program -> sample -> commit -> events

There is no prefill phase and no decode phase: a step lets computed tokens catch up with known ones. One thread at a
time: `kvarn.jobs.Runner` says which.
"""

import itertools
import secrets
import time
from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.errors import KvarnError, PromptTooLong, QueueFull
from kvarn.models.config import ModelConfig
from kvarn.request import Request, Sample, SamplingParams, Timing
from kvarn.sampling import History, Sampled, Sampler, make_sampler
from kvarn.scheduler import Scheduler, Work
from kvarn.stats import EngineStats


class Program(Protocol):
    """A model ready to run on some backend."""

    config: ModelConfig

    @property
    def nbytes(self) -> int: ...

    @property
    def workspace(self) -> int:
        """Bytes that it holds between steps besides the weights."""

    def run(
        self, cache: KVCache, tokens: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> Floats: ...


class Event(NamedTuple):
    """One sampled token."""

    sample: Sample
    sampled: Sampled
    gap: float | None = None  # seconds since the sample's token before; None for its first


class Engine:
    def __init__(self, program: Program, cache: KVCache, max_batch_tokens: int, eos_ids: Sequence[int] = ()) -> None:
        self.program = program
        self.cache = cache
        self.scheduler = Scheduler(cache, max_batch_tokens)
        self.max_waiting: int | None = None  # requests that may wait for room; None: any number
        self.stats = EngineStats()
        self._work: list[Work] = []  # of the step under way
        self._eos = frozenset(eos_ids)
        self._ids = itertools.count()
        self._requests: dict[int, tuple[Request, Sampler]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        conversation: Hashable = None,
        priority: int = 0,
    ) -> Request:
        """Queue a request. What can never be served is refused here, with the numbers.

        Where the strategy shares no prefixes, requests of one `conversation` go on in the last one's sequence."""
        self._check(prompt)
        self._check_queue()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        timing = Timing(queued=time.perf_counter())
        talk = _scoped(salt, conversation)
        request = Request(next(self._ids), list(prompt), params, seed, timing, salt, talk, priority)
        sampler = make_sampler(params, seed, self.program.config.vocab_size)
        request.samples = [Sample(next(self._ids), request, k, list(prompt)) for k in range(params.n)]
        self._requests[request.id] = (request, sampler)
        self.scheduler.add(request.samples[0])  # the others fork from it once the prompt is computed
        return request

    def check_length(self, n_tokens: int, at_least: bool = False) -> None:
        """Refuse a prompt of so many tokens (`at_least`: so many or more) that leaves no room for an answer. May be
        called from any thread."""
        found = f"the prompt has {'at least ' if at_least else ''}{n_tokens} tokens and"
        context = self.cache.plan.groups[0].geometry.context
        if n_tokens >= context:
            raise PromptTooLong(
                f"{found} the context holds {context}: shorten the prompt or raise the context (-c); "
                "the answer needs room for at least one token"
            )
        if n_tokens >= self.cache.longest:
            raise PromptTooLong(
                f"{found} the whole cache holds {self.cache.longest}: shorten the prompt or raise the cache's bytes "
                "(--cache-bytes)"
            )

    def cancel(self, request: Request) -> None:
        """Free what the request holds, at once. Safe to call for one that has finished."""
        for sample in request.samples:
            if sample.finish_reason is None:
                self._finish(sample, "cancelled")

    def forget(self, conversation: Hashable, salt: bytes = b"") -> None:
        """Free what is kept of a conversation. Safe to call for one that is not."""
        self.scheduler.kept.forget(_scoped(salt, conversation))

    def finish(self, sample: Sample, reason: str) -> None:
        """End one sample early, as a stop string does; one that comes with the last token that may is a stop, too."""
        if sample.finish_reason is None:
            self._finish(sample, reason)
        elif (sample.finish_reason, reason) == ("length", "stop"):
            sample.finish_reason = reason

    def step(self) -> list[Event]:
        """One step of everything that moves. A fault in it is raised; `isolate` then lets the others go on."""
        self._work = []  # if scheduling fails, nobody of the step before is to blame
        self._work = self.scheduler.schedule()
        if not self._work:
            return []
        start = time.perf_counter()
        for sample, _ in self._work:
            if sample.request.timing.started is None:
                sample.request.timing.started = start
        events = self._run(self._work)
        now = time.perf_counter()
        self._account(self._work, now - start)
        return [self._timed(event, now) for event in events]

    def isolate(self, error: BaseException) -> None:
        """After a step that raised: if it had one request, that one has failed. Otherwise all start over, one by one,
        to find out which; what they recompute is the same to the bit. An interrupt is no request's fault."""
        moving = self.scheduler.moving
        requests = {sample.request for sample, _ in self._work}
        if not requests and moving is not None:  # scheduling failed
            requests = {moving.request}
        if isinstance(error, Exception) and len(requests) == 1:
            self.fail(requests.pop(), error)
        elif self.scheduler.running:
            self.scheduler.isolate()
        else:
            raise error

    def fail(self, request: Request, error: Exception) -> None:
        """End a request through a fault that is its own."""
        request.error = error
        for sample in request.samples:
            self.finish(sample, "error")

    def _run(self, work: list[Work]) -> list[Event]:
        by_id = {sample.id: (sample, n) for sample, n in work}
        step = self.cache.prepare(list(by_id))
        order = [by_id[seq] for seq in step.seqs]
        parts = [sample.tokens[sample.computed : sample.computed + n] for sample, n in order]
        ends = itertools.accumulate(n for _, n in order)
        ready = [(sample, end - 1) for (sample, n), end in zip(order, ends, strict=True) if n == sample.missing]
        tokens = np.array(list(itertools.chain.from_iterable(parts)), np.int64)
        rows = np.array([row for _, row in ready], np.int64)
        logits = self.program.run(self.cache, tokens, step.positions, rows)
        self.stats.peak_blocks = max(self.stats.peak_blocks, sum(p.n_used for p in self.cache.placements))
        for (sample, n), part in zip(order, parts, strict=True):
            self.cache.commit(sample.id, part)
            sample.computed += n
        events: list[Event] = []
        for found, (sample, _) in zip(logits, ready, strict=True):
            try:
                events += self._sample(sample, found)
            except Exception as error:  # noqa: BLE001 (one request's fault is not the others')
                self.fail(sample.request, error)
        return events

    def _sample(self, sample: Sample, logits: Floats) -> list[Event]:
        """The next token of a sample that caught up; at the end of a prompt, the first token of all the samples."""
        request, sampler = self._requests[sample.request.id]
        siblings: list[Sample] = []
        if sample.index == 0 and not sample.n_output:  # the prompt is computed, for the first time
            siblings = [s for s in request.samples[1:] if s.finish_reason is None]
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.cached_tokens += request.adoption.reused if request.adoption else 0
        events = []
        for each in (sample, *siblings):
            if each is not sample:
                self.scheduler.adopt_fork(sample, each)
            sampled = sampler(logits, History(each.tokens, len(request.prompt)), each.index)
            each.tokens.append(sampled.token)
            self.stats.generated_tokens += 1
            events.append(Event(each, sampled))
        for event in events:
            self._check_end(event.sample, event.sampled.token)
        return events

    def _check_end(self, sample: Sample, token: int) -> None:
        params = sample.request.params
        if token in params.stop_tokens or (token in self._eos and not params.ignore_eos):
            self._finish(sample, "stop")
        elif sample.n_output >= params.max_tokens or len(sample.tokens) > self.cache.longest:
            self._finish(sample, "length")

    def _finish(self, sample: Sample, reason: str) -> None:
        sample.finish_reason = reason
        self.scheduler.remove(sample)
        request = sample.request
        if request.done:
            request.timing.finished = time.perf_counter()
            self.stats.finished += 1
            self.stats.request_seconds += request.timing.finished - request.timing.queued
            self._requests.pop(request.id, None)
            if not self.busy:
                self.cache.check()

    def _check(self, prompt: Sequence[int]) -> None:
        vocab = self.program.config.vocab_size
        if not prompt:
            raise KvarnError("the prompt is empty: give it at least one token")
        try:
            ids = array("q", prompt)
        except (TypeError, OverflowError):
            raise KvarnError("the prompt has a token that is not an integer: give text or token ids") from None
        if any(not 0 <= token < vocab for token in ids):
            raise KvarnError(f"the prompt has a token outside the vocabulary of {vocab}")
        self.check_length(len(ids))

    def _check_queue(self) -> None:
        free = self.cache.plan.max_seqs - len(self.scheduler.running)
        if self.max_waiting is not None and len(self.scheduler.waiting) >= self.max_waiting + max(free, 0):
            raise QueueFull(
                f"{len(self.scheduler.running)} sequences run and {len(self.scheduler.waiting)} wait, which is as many "
                "as may: try again later"
            )

    def _timed(self, event: Event, now: float) -> Event:
        sample = event.sample
        before, sample.latest = sample.latest, now
        if sample.request.timing.answered is None:
            sample.request.timing.answered = now
        return event._replace(gap=None if before is None else now - before)

    def _account(self, work: list[Work], seconds: float) -> None:
        stats, tokens = self.stats, sum(n for _, n in work)
        stats.steps += 1
        if any(n > 1 for _, n in work):
            stats.prefill_seconds += seconds
            stats.prefill_tokens += tokens
        else:
            stats.decode_seconds += seconds
            stats.decode_tokens += tokens
        for sample, n in work:
            self._charge(sample, n, seconds / tokens)

    @staticmethod
    def _charge(sample: Sample, n: int, each: float) -> None:
        """What of a step's time went into this sample's prompt, and into what a preemption lost."""
        timing, end = sample.request.timing, sample.computed
        again = max(min(sample.furthest, end) - (end - n), 0)
        timing.again_tokens += again
        timing.again_seconds += each * again
        start = end - n + again
        timing.prompt_seconds += each * max(min(end, len(sample.request.prompt)) - start, 0)
        sample.furthest = max(sample.furthest, end)


def _scoped(salt: bytes, conversation: Hashable) -> Hashable:
    """Only requests of equal salt can be in one conversation."""
    return None if conversation is None else (salt, conversation)
