"""The engine: continuous batching over one model and one cache, in token ids.

    schedule -> reserve (or preempt, or wait) -> prepare -> run the program -> advance -> sample -> commit -> events

A device that keeps the tokens it samples runs ahead by one step: while all samples decode, step t + 1 is
launched before the tokens of step t are read. A sample that ends at t is put back to what it had, and
its part of t + 1 is dropped. Nothing is committed before its token is known.

There is no prefill phase and no decode phase. A sample has known tokens and computed tokens, and a step
computes more of the known ones. Only one thread at a time may use an engine (`kvarn.jobs.runner.Runner`
ensures it). Non-goals: text, HTTP.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvarn.backends.base import Logits, Memory, Program
from kvarn.cache.cache import KVCache
from kvarn.cache.step import Step
from kvarn.engine.admission import check_length, check_prompt, check_queue
from kvarn.engine.config import EngineConfig
from kvarn.engine.constraint import FREE, Constraint
from kvarn.engine.drafting import draws_alike, host_only, make_drafter, runs_ahead
from kvarn.engine.drawing import Drawing, Launched, find_rows
from kvarn.engine.params import TEXT_DEFAULTS, SamplingParams
from kvarn.engine.parked import scoped
from kvarn.engine.pooling import Pool
from kvarn.engine.recall import NO_TIERS, Tiers
from kvarn.engine.request import Begun, Request, Sample, Timing
from kvarn.engine.restored import RestoredTexts
from kvarn.engine.sampling import Sampled, make_sampler
from kvarn.engine.scheduler import Scheduler, Work
from kvarn.engine.stats import EngineStats
from kvarn.errors import BadLogits, KvarnError


class Event(NamedTuple):
    """One sampled token."""

    sample: Sample
    sampled: Sampled
    gap: float | None = None  # seconds since the sample's previous token; None for the first token


class Engine:
    """`n_tokens` is the number of ids that the tokenizer has. A model may have more rows of logits (a padded
    vocabulary). These rows are never sampled."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        cache: KVCache,
        config: EngineConfig | None = None,
        eos_ids: Sequence[int] = (),
        n_tokens: int | None = None,
        tiers: Tiers = NO_TIERS,
    ) -> None:
        self.program = program
        self.memory = memory
        self.cache = cache
        self.config = config or EngineConfig()
        self.tiers = tiers
        self.scheduler = Scheduler(cache, self.config, tiers)
        self.stats = EngineStats()
        self._ids = itertools.count()
        self.restored = RestoredTexts(cache, self.scheduler.parked, self._ids)
        self._work: list[Work] = []  # of the current step
        self._ahead: Launched | None = None  # the step after it, if it is launched already
        self._step: Step | None = None  # the prepared step, until the program has applied it
        self._n_faults = 0  # errors since the last good step for which no request could be blamed
        self._eos = frozenset(eos_ids)
        self._n_tokens = min(n_tokens or program.config.vocab_size, program.config.vocab_size)
        self._requests: dict[int, Request] = {}  # unfinished

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
        announce: Callable[[Request], None] = lambda request: None,
        pool: Pool | None = None,
        begun: Begun | None = None,
    ) -> Request:
        """Queue a request. Raises if the request can never be served, or if the queue is full. Settings that are open
        take the defaults of a text.

        `constrain(k)` makes the constraint of sample k. If the strategy does not share prefixes, a
        request continues the sequence of the last request with the same `conversation`. `announce` is
        called just before the request is queued, so that its owner can cancel it after an interrupt. With
        a `pool` the request has no answer: it ends when the pool has the prompt's hidden states. An answer that has
        `begun` goes on."""
        known = [*prompt, *begun.tokens] if begun else list(prompt)
        check_prompt(known, self.cache, self._n_tokens)
        check_queue(self.scheduler, self.cache.plan.max_seqs, self.config.max_waiting)
        params = params.with_defaults(TEXT_DEFAULTS)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        timing = Timing(queued_at=time.perf_counter())
        continued = self.restored.conversation(salt, conversation)
        request = Request(next(self._ids), list(prompt), params, seed, timing, salt, continued, priority, pool)
        first = begun.sample if begun else 0
        request.sampler = make_sampler(params, seed, self._n_tokens, first)
        request.drafter, request.host_only = make_drafter(params, seed, first), host_only(params)
        request.runs_ahead, request.draws_alike = runs_ahead(params), draws_alike(params)
        request.n_begun = len(known) - len(prompt)
        request.samples = [
            Sample(next(self._ids), request, k, list(known), constraint=constrain(k)) for k in range(params.n)
        ]
        announce(request)
        self.scheduler.add(request.samples[0])  # the other samples fork from it when the prompt is computed
        self._requests[request.id] = request
        return request

    def check_length(self, n_tokens: int, at_least: bool = False) -> None:
        """Raise PromptTooLong if a prompt of n_tokens tokens leaves no room for an answer.

        `at_least`: the prompt has n_tokens or more; only the message differs. Safe from any thread."""
        check_length(n_tokens, self.cache, at_least)

    def cancel(self, request: Request) -> None:
        """End the request and free its blocks. Does nothing if it has finished."""
        for sample in request.samples:
            if sample.finish_reason is None:
                self._finish(sample, "cancelled")

    def forget(self, conversation: Hashable, salt: bytes = b"") -> None:
        """Free the parked sequence of the conversation, if it has one."""
        self.scheduler.parked.drop(scoped(salt, conversation))

    def restart(self, sample: Sample, tokens: Sequence[int], keep: int) -> None:
        """Replace the tokens of a running sample and rewind it to `keep` computed tokens, which must be equal in the
        old and the new tokens. Benchmarks use it to repeat a step."""
        self._drop(sample)
        sample.computed = self.cache.rewind(sample.id, min(keep, sample.computed))
        sample.tokens[:] = sample.request.prompt[:] = tokens

    def finish(self, sample: Sample, reason: str) -> None:
        """End a sample early. If it had just reached max_tokens, a stop string in the same token still reports
        `stop`."""
        if sample.finish_reason is None:
            self._finish(sample, reason)
        elif (sample.finish_reason, reason) == ("length", "stop"):
            sample.finish_reason, sample.limit = reason, None

    def step(self) -> list[Event]:
        """Run one step for every request that has room. If it raises, call `isolate` before the next step."""
        current, self._ahead = self._ahead, None
        if current is not None and not current.live:
            current.drawing.tokens(self.stats, current.dropped)  # its buffers can be used again
            current = None
        work = self._work = self.scheduler.schedule() if current is None else current.live
        if not work:
            self.scheduler.recall.pause()
            return []
        start = time.perf_counter()
        decodes = current is not None or all(each.decodes for each in work)
        if current is None:
            self._begin(work, start)
        events = self._finish_step(current or self._launch(self._work)) if self._work else []
        seconds = time.perf_counter() - start
        self.stats.account(work, decodes, seconds)
        if not decodes:
            self.tiers.computed(sum(each.n for each in work), seconds)
        self._work = []
        self._n_faults = 0
        return events

    def _begin(self, work: list[Work], now: float) -> None:
        """Note the requests that begin. Those that want hidden states are computed here."""
        for each in work:
            if each.sample.request.timing.started_at is None:
                each.sample.request.timing.started_at = now
                self.restored.note_source(each.sample.request)
        pooled = [each for each in work if each.sample.request.pool is not None]
        if pooled:
            self._compute_states(pooled)
            self._work = [each for each in work if each.sample.request.pool is None]

    def isolate(self, error: BaseException) -> None:
        """Handle an error of `step`, or of another call that was interrupted at any line.

        If the step had one request, that request fails. Otherwise retry all requests one at a time; a
        request that fails alone is reported as failed. The retry computes the same bits. An interrupt
        fails no request. Raises the error if it comes again and no request can be blamed."""
        requests = {work.sample.request for work in self._work}
        if not requests and self.scheduler.moving is not None:  # scheduling failed
            requests = {self.scheduler.moving.request}
        self._work, step, self._step, self._ahead = [], self._step, None, None
        blamed = requests.pop() if isinstance(error, Exception) and len(requests) == 1 else None
        if step is not None:  # the program failed, and the bookkeeping is right
            lost = self.cache.drop(step)
            if blamed is None:
                self.scheduler.isolate()
            else:
                self.scheduler.recompute(lost)  # first: a lost sequence cannot be parked
                self.fail(blamed, error)
        elif isinstance(error, KvarnError) and blamed is not None:  # refused before anything changed
            self.fail(blamed, error)
        else:
            self._restart()
            if blamed is not None:
                self.fail(blamed, error)
        self._n_faults = 0 if blamed is not None else self._n_faults + 1
        if self._n_faults > 1:
            raise error

    def _restart(self) -> None:
        """An error left the bookkeeping half done. Begin with an empty cache, and compute all samples again."""
        self.cache.reset()
        self.restored.clear()
        unfinished: list[Sample] = []
        for request in list(self._requests.values()):
            first = request.samples[0]
            forked = first.n_output > 0 or first.finish_reason is not None
            samples = request.samples if forked else [first]
            unfinished += [sample for sample in samples if sample.finish_reason is None]
        self.scheduler.restart(unfinished)
        for request in list(self._requests.values()):
            self._conclude(request)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with the error that it caused."""
        request.error = error
        for sample in request.samples:
            self.finish(sample, "error")

    def _prepare(self, work: list[Work]) -> tuple[Step, list[Work], list[int]]:
        """A step for this work, the work in the step's order, and the rows that it needs."""
        by_id = {each.sample.id: each for each in work}
        step = self._step = self.cache.prepare(list(by_id))
        order = [by_id[seq] for seq in step.seqs]
        ends = itertools.accumulate(step.n_new)
        wanted = [row for w, end in zip(order, ends, strict=True) for row in range(end - w.n_rows, end)]
        return step, order, wanted

    def _compute_states(self, work: list[Work]) -> None:
        """A step of its own for requests that want hidden states and no token."""
        step, order, wanted = self._prepare(work)
        given = list(itertools.chain.from_iterable(map(_new_tokens, order)))
        states = iter(self.program.hidden(self.memory, step, given, wanted))
        self._step = None
        self.cache.launched(step)
        for w in order:
            sample, request = w.sample, w.sample.request
            assert request.pool is not None
            rows = list(itertools.islice(states, w.n_rows))
            self.cache.commit(sample.id, _new_tokens(w))
            sample.computed += w.n
            try:
                request.pool.take(rows, sample.computed - w.n_rows)
            except BadLogits as error:
                self.fail(request, error)
            if not sample.missing and not sample.finish_reason:
                self.stats.count_prompt(request)
                self._finish(sample, "stop")

    def _launch(self, work: list[Work]) -> Launched:
        step, order, wanted = self._prepare(work)
        given = list(itertools.chain.from_iterable(map(_new_tokens, order)))
        logits = self._run(step, given, wanted)
        return Launched(order, Drawing(find_rows(order, logits.samples), logits, self._n_tokens), set())

    def _run(self, step: Step, given: Sequence[int], wanted: Sequence[int]) -> Logits:
        logits = self.program.run(self.memory, step, given, wanted)
        self._step = None
        self.stats.peak_blocks = max(self.stats.peak_blocks, sum(p.n_used for p in self.cache.placements))
        self.cache.launched(step)
        return logits

    def _launch_ahead(self, current: Launched) -> None:
        """Launch the step after `current`, whose tokens only the device has, if that is what comes next.

        Every row must decode, and only its own request decides whether it can be drawn now. Samples whose length ends
        with their next token are left out."""
        order = current.order
        if self.cache.plan.ahead < 1 or not current.drawing.leads_on:
            return
        if not (current.ahead or all(w.decodes and w.sample.request.runs_ahead for w in order)):
            return
        if not self.scheduler.steady({w.sample for w in current.live}):
            return
        dropped = current.dropped
        rows = [row for row, w in enumerate(order) if not (w.sample in dropped or self._ends_next(w.sample))]
        going = order if len(rows) == len(order) else [order[row] for row in rows]
        seqs = [w.sample.id for w in going]
        if going and self.cache.reserve_next(seqs):
            step = self._step = self.cache.prepare(seqs)
            assert step.seqs == tuple(seqs), "the order of a step is not that of the one before"
            logits = self._run(step, [-1 - row for row in rows], range(len(rows)))
            self._ahead = Launched(going, current.drawing.next(rows, logits), set(), ahead=True)
            self.stats.steps_ahead += 1

    def _finish_step(self, current: Launched) -> list[Event]:
        """Read the tokens of a launched step, after the next one is launched if possible."""
        self._launch_ahead(current)
        drawn = current.drawing.tokens(self.stats, current.dropped)
        now = time.perf_counter()
        live = current.live
        if current.ahead:
            samples = [w.sample for w in live]
            known = [sample.tokens[sample.computed] for sample in samples]
            self.cache.commit_next([sample.id for sample in samples], known)
        else:
            for w in live:
                self.cache.commit(w.sample.id, _new_tokens(w))
        for w in live:
            w.sample.computed += w.n
        events: list[Event] = []
        for drawn_for, result in drawn:
            if isinstance(result, Exception):
                self.fail(drawn_for[0].request, result)
            else:
                events += self._take(drawn_for, result, now)
        return events

    def _drop(self, sample: Sample) -> None:
        """Forget the sample's part of the step ahead. Its sequence is as before that step."""
        if self._ahead is not None and any(w.sample is sample for w in self._ahead.live):
            self._ahead.dropped.add(sample)
            sample.computed = self.cache.rewind(sample.id, sample.computed)

    def _take(self, samples: list[Sample], tokens: list[Sampled], now: float) -> list[Event]:
        """Append the sampled tokens. All samples after the first fork from it."""
        first = samples[0]
        request = first.request
        if first.index == 0 and first.n_output == request.n_begun:
            self.stats.count_prompt(request)
            request.timing.first_token_at = now
        for sample in samples[1:]:
            self.scheduler.adopt_fork(first, sample)
        self.stats.generated_tokens += len(samples)
        events = []
        for sample, sampled in zip(samples, tokens, strict=True):
            sample.tokens.append(sampled.token)
            before, sample.last_token_at = sample.last_token_at, now
            events.append(Event(sample, sampled, None if before is None else now - before))
        for sample, sampled in zip(samples, tokens, strict=True):
            self._check_end(sample, sampled.token)
        return events

    def _check_end(self, sample: Sample, token: int) -> None:
        params = sample.request.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            sample.complete = False
            self._finish(sample, "stop")
        elif sample.complete:
            self._finish(sample, "stop")
        elif len(sample.tokens) >= self.cache.longest:  # first: a larger max_tokens would not help
            sample.limit = "context"
            self._finish(sample, "length")
        elif sample.n_output >= (params.max_tokens or 0):
            sample.limit = "max_tokens"
            self._finish(sample, "length")

    def _ends_next(self, sample: Sample) -> bool:
        """Whether the sample ends with its next token, whatever that is."""
        n_tokens, n_output = len(sample.tokens) + 1, sample.n_output + 1
        return n_tokens >= self.cache.longest or n_output >= (sample.request.params.max_tokens or 0)

    def _finish(self, sample: Sample, reason: str) -> None:
        self._drop(sample)
        sample.finish_reason = reason
        self.scheduler.remove(sample)
        self._conclude(sample.request)
        if not self.busy:
            self.cache.check()

    def _conclude(self, request: Request) -> None:
        """Account for a request, if all its samples have finished."""
        if request.done and request.timing.finished_at is None:
            request.timing.finished_at = time.perf_counter()
            self.stats.finished += 1
            self.stats.request_seconds += request.timing.finished_at - request.timing.queued_at
        if request.done:
            self._requests.pop(request.id, None)


def _new_tokens(work: Work) -> list[int]:
    return work.sample.tokens[work.sample.computed : work.sample.computed + work.n]
