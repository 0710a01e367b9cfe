"""The engine: continuous batching over one model and one cache. It speaks token ids.

    schedule -> reserve (or preempt, or wait) -> prepare -> run the program -> advance -> sample -> commit -> events

There is no prefill phase and no decode phase: a step lets computed tokens catch up with known ones. One thread at a
time: `kvarn.jobs.runner.Runner` says which.
"""

import itertools
import secrets
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvarn.arrays import Floats
from kvarn.backends.base import Memory, Program
from kvarn.cache.cache import KVCache
from kvarn.cache.step import Step
from kvarn.engine.config import EngineConfig
from kvarn.engine.constraint import FREE, Constraint
from kvarn.engine.request import Request, Sample, SamplingParams, Timing
from kvarn.engine.sampling import History, Sampled, Sampler, make_sampler
from kvarn.engine.scheduler import Scheduler, Work
from kvarn.engine.stats import EngineStats
from kvarn.errors import KvarnError, PromptTooLong, QueueFull


class Event(NamedTuple):
    """One sampled token."""

    sample: Sample
    sampled: Sampled
    gap: float | None = None  # seconds since the sample's token before; None for its first


class Engine:
    def __init__(
        self,
        program: Program,
        memory: Memory,
        cache: KVCache,
        config: EngineConfig | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.memory = memory
        self.cache = cache
        self.config = config or EngineConfig()
        self.scheduler = Scheduler(cache, self.config)
        self.stats = EngineStats()
        self._work: list[Work] = []  # of the step under way
        self._step: Step | None = None  # prepared, and not known to be applied
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
        constrain: Callable[[int], Constraint] = lambda k: FREE,
    ) -> Request:
        """Queue a request. What can never be served is refused here, with the numbers. `constrain` makes the
        constraint of sample k.

        Where the strategy shares no prefixes, requests of one `conversation` continue the last one's sequence."""
        self._check(prompt)
        self._check_queue()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        timing = Timing(queued_at=time.perf_counter())
        talk = _scoped(salt, conversation)
        request = Request(next(self._ids), list(prompt), params, seed, timing, salt, talk, priority)
        sampler = make_sampler(params, seed, self.program.config.vocab_size)
        request.samples = [
            Sample(next(self._ids), request, k, list(prompt), constraint=constrain(k)) for k in range(params.n)
        ]
        self._requests[request.id] = (request, sampler)
        self.scheduler.add(request.samples[0])  # the others fork from it once the prompt is computed
        return request

    def check_length(self, n_tokens: int, at_least: bool = False) -> None:
        """Refuse a prompt of so many tokens (`at_least`: so many or more) that leaves no room for an answer. May be
        called from any thread."""
        found = f"the prompt has {'at least ' if at_least else ''}{n_tokens} tokens and"
        context = self.cache.plan.context
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
        """Free the parked sequence of a conversation, if there is one."""
        self.scheduler.parked.drop(_scoped(salt, conversation))

    def restart(self, sample: Sample, tokens: Sequence[int], keep: int) -> None:
        """Give a running sample another prompt, `tokens`, of which the first `keep` are those it has computed. For
        measuring the same step again."""
        sample.computed = self.cache.rewind(sample.id, min(keep, sample.computed))
        sample.tokens[:] = sample.request.prompt[:] = tokens

    def finish(self, sample: Sample, reason: str) -> None:
        """End a sample early. If it had just reached max_tokens, a stop string in the same token still reports
        `stop`."""
        if sample.finish_reason is None:
            self._finish(sample, reason)
        elif (sample.finish_reason, reason) == ("length", "stop"):
            sample.finish_reason = reason

    def step(self) -> list[Event]:
        """One step for every request that can move. A fault in it is raised; call `isolate` to go on without it."""
        self._work = []  # if scheduling fails, no request of the step before is at fault
        self._work = self.scheduler.schedule()
        if not self._work:
            return []
        start = time.perf_counter()
        for work in self._work:
            if work.sample.request.timing.started_at is None:
                work.sample.request.timing.started_at = start
        decodes = all(work.decodes for work in self._work)
        events = self._run(self._work)
        now = time.perf_counter()
        self._account(self._work, decodes, now - start)
        return [self._timed(event, now) for event in events]

    def isolate(self, error: BaseException) -> None:
        """After a step that raised: if it had one request, that request fails. Otherwise all are preempted and run one
        by one; the one that fails alone is at fault. Recomputing gives the same bits. An interrupt fails no request."""
        lost = self.cache.drop(self._step) if self._step is not None else []
        self._step = None
        moving = self.scheduler.moving
        requests = {work.sample.request for work in self._work}
        if not requests and moving is not None:  # scheduling failed
            requests = {moving.request}
        if isinstance(error, Exception) and len(requests) == 1:
            self.fail(requests.pop(), error)
            self.scheduler.recompute(lost)
        elif self.scheduler.running:
            self.scheduler.isolate()
        else:
            raise error

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with the error that it caused."""
        request.error = error
        for sample in request.samples:
            self.finish(sample, "error")

    def _run(self, work: list[Work]) -> list[Event]:
        by_id = {each.sample.id: each for each in work}
        step = self._step = self.cache.prepare(list(by_id))
        order = [by_id[seq] for seq in step.seqs]
        parts = [w.sample.tokens[w.sample.computed : w.sample.computed + w.n] for w in order]
        ends = itertools.accumulate(step.n_new)
        wanted = [row for w, end in zip(order, ends, strict=True) for row in range(end - w.n_rows, end)]
        tokens = list(itertools.chain.from_iterable(parts))
        logits = self.program.run(self.memory, step, tokens, wanted)
        self._step = None
        self.stats.peak_blocks = max(self.stats.peak_blocks, sum(p.n_used for p in self.cache.placements))
        self.cache.launched(step)
        drawn = self._draw(order, logits.rows())
        for w, part in zip(order, parts, strict=True):
            self.cache.commit(w.sample.id, part)
            w.sample.computed += w.n
        events: list[Event] = []
        for samples, found in drawn:
            if isinstance(found, Exception):
                self.fail(samples[0].request, found)
            else:
                events += self._take(samples, found)
        return events

    def _draw(self, order: list[Work], rows: Floats) -> list[tuple[list[Sample], list[Sampled] | Exception]]:
        """The next token of each sample that caught up. At the end of a prompt, the first token of all samples of the
        request. An exception in one request's sampler fails that request only."""
        drawn: list[tuple[list[Sample], list[Sampled] | Exception]] = []
        end = 0
        for w in order:
            end += w.n_rows
            if not w.n_rows or w.n < w.sample.missing:  # in the middle of a prompt
                continue
            row = rows[end - 1]  # of its newest token; what follows the others is known
            request, sampler = self._requests[w.sample.request.id]
            n_prompt = len(request.prompt)
            samples = [w.sample]
            # Tokens outlive a preemption: this is the first time that the prompt is computed.
            if w.sample.index == 0 and len(w.sample.tokens) == n_prompt:
                samples += [s for s in request.samples[1:] if s.finish_reason is None]
            found: list[Sampled] | Exception
            try:
                found = [sampler(row, History(s.tokens, n_prompt), s.index, s.constraint) for s in samples]
            except Exception as error:  # noqa: BLE001 (it fails this request only)
                found = error
            drawn.append((samples, found))
        return drawn

    def _take(self, samples: list[Sample], found: list[Sampled]) -> list[Event]:
        """The sampled tokens become known; all but the first sample fork off it."""
        first = samples[0]
        request = first.request
        if first.index == 0 and len(first.tokens) == len(request.prompt):
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.cached_tokens += request.adoption.reused if request.adoption else 0
        for sample, sampled in zip(samples, found, strict=True):
            if sample is not first:
                self.scheduler.adopt_fork(first, sample)
            sample.tokens.append(sampled.token)
            sample.constraint.accept(sampled.token)
        self.stats.generated_tokens += len(samples)
        for sample, sampled in zip(samples, found, strict=True):
            self._check_end(sample, sampled.token)
        return [Event(sample, sampled) for sample, sampled in zip(samples, found, strict=True)]

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
            request.timing.finished_at = time.perf_counter()
            self.stats.finished += 1
            self.stats.request_seconds += request.timing.finished_at - request.timing.queued_at
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
        most = self.config.max_waiting
        if most is not None and len(self.scheduler.waiting) >= most + max(free, 0):
            raise QueueFull(
                f"the queue is full ({len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting): "
                "try again later"
            )

    def _timed(self, event: Event, now: float) -> Event:
        sample = event.sample
        before, sample.last_token_at = sample.last_token_at, now
        if sample.request.timing.first_token_at is None:
            sample.request.timing.first_token_at = now
        return event._replace(gap=None if before is None else now - before)

    def _account(self, work: list[Work], decodes: bool, seconds: float) -> None:
        stats, tokens = self.stats, sum(each.n for each in work)
        stats.steps += 1
        if decodes:
            stats.decode_seconds += seconds
            stats.decode_tokens += tokens
        else:
            stats.prefill_seconds += seconds
            stats.prefill_tokens += tokens
        for each in work:
            self._charge(each.sample, each.n, seconds / tokens)

    @staticmethod
    def _charge(sample: Sample, n: int, each: float) -> None:
        """What of a step's time went into this sample's prompt, and into what a preemption lost."""
        timing, end = sample.request.timing, sample.computed
        repeated = max(min(sample.furthest, end) - (end - n), 0)
        timing.recomputed_tokens += repeated
        timing.recomputed_seconds += each * repeated
        start = end - n + repeated
        timing.prefill_seconds += each * max(min(end, len(sample.request.prompt)) - start, 0)
        sample.furthest = max(sample.furthest, end)


def _scoped(salt: bytes, conversation: Hashable) -> Hashable:
    """Only requests of equal salt can be in one conversation."""
    return None if conversation is None else (salt, conversation)
