"""The engine: continuous batching over one model and one cache. It speaks token ids.

    schedule -> reserve (or preempt, or wait) -> copies -> tables -> run the program -> sample -> commit -> events

There is no prefill phase and no decode phase: a step lets computed tokens catch up with known ones. The engine
belongs to one thread.
"""

import itertools
import secrets
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.cache import KVCache
from kvarn.cache.codec import Floats
from kvarn.errors import KvarnError
from kvarn.models.config import ModelConfig
from kvarn.request import Request, Sample, SamplingParams
from kvarn.sampling import History, Sampled, Sampler, make_sampler
from kvarn.scheduler import Scheduler, Work
from kvarn.stats import EngineStats


class Program(Protocol):
    """A model ready to run on some backend."""

    config: ModelConfig

    @property
    def nbytes(self) -> int: ...

    def run(
        self, cache: KVCache, tokens: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> Floats: ...


class Event(NamedTuple):
    """One sampled token."""

    sample: Sample
    sampled: Sampled


class Engine:
    def __init__(self, program: Program, cache: KVCache, max_batch_tokens: int, eos_ids: Sequence[int] = ()) -> None:
        self.program = program
        self.cache = cache
        self.scheduler = Scheduler(cache, max_batch_tokens)
        self.stats = EngineStats()
        self._eos = frozenset(eos_ids)
        self._ids = itertools.count()
        self._requests: dict[int, tuple[Request, Sampler]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, salt: bytes = b"", conversation: Hashable = None
    ) -> Request:
        """Queue a request. What can never be served is refused here, with the numbers.

        Where the strategy shares no prefixes, requests of one `conversation` go on in the last one's sequence."""
        self._check(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(next(self._ids), list(prompt), params, seed, salt, _scoped(salt, conversation))
        sampler = make_sampler(params, seed, self.program.config.vocab_size)
        request.samples = [Sample(next(self._ids), request, k, list(prompt)) for k in range(params.n)]
        self._requests[request.id] = (request, sampler)
        self.scheduler.add(request.samples[0])  # the others fork from it once the prompt is computed
        return request

    def cancel(self, request: Request) -> None:
        """Free what the request holds, at once. Safe to call for one that has finished."""
        for sample in request.samples:
            if sample.finish_reason is None:
                self._finish(sample, "cancelled")

    def forget(self, conversation: Hashable, salt: bytes = b"") -> None:
        """Free what is kept of a conversation. Safe to call for one that is not."""
        self.scheduler.kept.forget(_scoped(salt, conversation))

    def finish(self, sample: Sample, reason: str) -> None:
        """End one sample early, as a stop string does."""
        if sample.finish_reason is None:
            self._finish(sample, reason)

    def step(self) -> list[Event]:
        work = self.scheduler.schedule()
        if not work:
            return []
        start = time.perf_counter()
        events = self._run(work)
        self._account(work, time.perf_counter() - start)
        return events

    def _run(self, work: list[Work]) -> list[Event]:
        by_id = {sample.id: (sample, n) for sample, n in work}
        step = self.cache.prepare(list(by_id))
        order = [by_id[seq] for seq in step.seqs]
        parts = [sample.tokens[sample.computed : sample.computed + n] for sample, n in order]
        ends = np.cumsum([n for _, n in order])
        ready = [i for i, (sample, n) in enumerate(order) if n == sample.missing]
        tokens = np.array(list(itertools.chain.from_iterable(parts)), np.int64)
        logits = self.program.run(self.cache, tokens, step.positions, ends[ready] - 1)
        self.stats.peak_blocks = max(self.stats.peak_blocks, sum(p.n_used for p in self.cache.placements))
        for (sample, n), part in zip(order, parts, strict=True):
            self.cache.commit(sample.id, part)
            sample.computed += n
        events: list[Event] = []
        for row, i in zip(logits, ready, strict=True):
            events += self._sample(order[i][0], row)
        return events

    def _sample(self, sample: Sample, logits: Floats) -> list[Event]:
        """The next token of a sample that caught up; at the end of a prompt, the first token of all the samples."""
        request, sampler = self._requests[sample.request.id]
        siblings: list[Sample] = []
        if sample.index == 0 and not sample.output:  # the prompt is computed, for the first time
            siblings = [s for s in request.samples[1:] if s.finish_reason is None]
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.cached_tokens += request.adoption.reused if request.adoption else 0
        events = []
        for each in (sample, *siblings):
            if each is not sample:
                self.scheduler.adopt_fork(sample, each)
            sampled = sampler(logits, History(request.prompt, each.output), each.index)
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
        elif len(sample.output) >= params.max_tokens or len(sample.tokens) > self.cache.longest:
            self._finish(sample, "length")

    def _finish(self, sample: Sample, reason: str) -> None:
        sample.finish_reason = reason
        self.scheduler.remove(sample)
        request = sample.request
        if all(s.finish_reason for s in request.samples):
            self._requests.pop(request.id, None)
            if not self.busy:
                self.cache.check()

    def _check(self, prompt: Sequence[int]) -> None:
        vocab = self.program.config.vocab_size
        if not prompt:
            raise KvarnError("the prompt is empty: give it at least one token")
        if any(not 0 <= token < vocab for token in prompt):
            raise KvarnError(f"the prompt has a token outside the vocabulary of {vocab}")
        context = self.cache.plan.groups[0].geometry.context
        if len(prompt) >= context:
            raise KvarnError(
                f"the prompt has {len(prompt)} tokens and the context holds {context}, of which at least one is for "
                "the answer: shorten the prompt or raise the context (-c)"
            )
        if len(prompt) >= self.cache.longest:
            raise KvarnError(
                f"the prompt has {len(prompt)} tokens and the whole cache holds {self.cache.longest}: "
                "shorten the prompt or raise the cache's bytes (--cache-bytes)"
            )

    def _account(self, work: list[Work], seconds: float) -> None:
        stats, tokens = self.stats, sum(n for _, n in work)
        stats.steps += 1
        if any(n > 1 for _, n in work):
            stats.prefill_seconds += seconds
            stats.prefill_tokens += tokens
        else:
            stats.decode_seconds += seconds
            stats.decode_tokens += tokens
        stats.preemptions = self.scheduler.n_preemptions


def _scoped(salt: bytes, conversation: Hashable) -> Hashable:
    """Only requests of equal salt can be in one conversation."""
    return None if conversation is None else (salt, conversation)
