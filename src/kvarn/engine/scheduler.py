"""Which samples move in the next step, and by how many tokens.

Every sample that moves has its room reserved here. Those that decode go first, so that a long prompt never makes them
wait. Prompts fill the rest of the step's token budget in chunks; beside decodes the chunks are small, which bounds the
gap between two tokens. When there is no room, the newest sample is preempted: its blocks are freed and it waits to be
computed again, which gives the same tokens. After a failed step its samples run one by one (faults.py). Token ids only.
"""

from collections import deque
from collections.abc import Container
from typing import NamedTuple

from kvarn.cache.cache import KVCache
from kvarn.cache.placement import Adoption
from kvarn.engine.config import EngineConfig
from kvarn.engine.faults import OneByOne
from kvarn.engine.parked import ParkedSequences
from kvarn.engine.request import Sample


class Work(NamedTuple):
    """Tokens of one sample in one step, and of how many of its last rows logits are asked for."""

    sample: Sample
    n: int
    n_rows: int

    @property
    def decodes(self) -> bool:
        """It computes a token that was sampled, and nothing else."""
        return self.n == 1 and self.sample.computed >= len(self.sample.request.prompt)


class Scheduler:
    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self.cache = cache
        self.max_batch_tokens = config.max_batch_tokens
        self.max_chunk = cache.plan.max_chunk
        self._chunk_while_decoding = config.chunk_while_decoding or config.max_batch_tokens
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []  # oldest first
        self.parked = ParkedSequences(cache)
        self.moving: Sample | None = None  # the sample that `schedule` is finding room for: a fault there is its own
        self._one_by_one = OneByOne()
        self.n_preemptions = 0

    def add(self, sample: Sample) -> None:
        self.waiting.append(sample)

    def adopt_fork(self, parent: Sample, child: Sample) -> None:
        """`child` starts where the parent's computed tokens end; where it cannot, it waits its turn like any other."""
        child.furthest = parent.computed
        if self._has_row() and self.cache.fork(parent.id, child.id):
            child.computed = parent.computed
            self.running.append(child)
        else:
            self.waiting.append(child)

    def remove(self, sample: Sample) -> None:
        """Finished or cancelled: free its blocks, or park them for the next turn of its conversation."""
        if sample in self.running:
            self.running.remove(sample)
            conversation = sample.request.conversation if sample.index == 0 else None
            self.parked.park(conversation, sample.id, sample.tokens[: sample.computed])
        elif sample in self.waiting:
            self.waiting.remove(sample)
            self.cache.free(sample.id)  # open only where a fault cut its admission short

    def schedule(self) -> list[Work]:
        self.moving = None
        if alone := self._one_by_one.next():
            return self._run_alone(alone)
        work: dict[Sample, int] = {}
        budget = self._continue(work)
        while budget and self.waiting:
            n = self._admit(self.waiting[0], budget)
            if not n:
                break
            work[self._enter(self.waiting[0])] = n
            budget -= n
        return [_work(sample, n) for sample, n in work.items()]

    def _continue(self, work: dict[Sample, int]) -> int:
        """Those that run, decodes first, each by age; what is left of the token budget for those that wait."""
        budget, preempted = self.max_batch_tokens, self.n_preemptions
        decoding = [sample for sample in self.running if sample.missing == 1]
        prompts = [sample for sample in self.running if sample.missing > 1]
        for group in (decoding, prompts):
            for sample in group:
                n = min(sample.missing, self.max_chunk, budget)
                if n and sample in self.running and self._reserve(sample, n, work):
                    work[sample] = n
                    budget -= n
            if decoding:
                budget = min(budget, self._chunk_while_decoding)
        return budget if self.n_preemptions == preempted else 0

    def _enter(self, sample: Sample) -> Sample:
        self.waiting.remove(sample)
        self.running.append(sample)
        return sample

    def isolate(self) -> None:
        """A step failed and the request at fault is unknown: preempt all that run, and run each alone."""
        for sample in reversed(list(self.running)):
            self._preempt(sample)
            self._one_by_one.put_first(sample)

    def recompute(self, seqs: Container[int]) -> None:
        """Preempt the samples of these sequences, which were lost with a step."""
        for sample in reversed(list(self.running)):
            if sample.id in seqs:
                self._preempt(sample)

    def _run_alone(self, sample: Sample) -> list[Work]:
        """Run one sample of the failed step alone. Preempt the others if needed: any admitted request fits when it is
        alone."""
        while True:
            if sample in self.waiting:
                if n := self._admit(sample, self.max_batch_tokens):
                    return [_work(self._enter(sample), n)]
            else:
                n = min(sample.missing, self.max_chunk, self.max_batch_tokens)
                if self._reserve(sample, n, {}):
                    return [_work(sample, n)]
            others = [other for other in self.running if other is not sample]
            if not others:
                return []
            self._preempt(others[-1])

    def _reserve(self, sample: Sample, n: int, work: dict[Sample, int]) -> bool:
        self.moving = sample
        while not self.cache.reserve(sample.id, sample.computed + n):
            if self.parked.drop_oldest():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            work.pop(victim, None)
            if victim is sample:
                return False
        return True

    def _preempt(self, victim: Sample) -> None:
        self.running.remove(victim)
        self.cache.free(victim.id)
        victim.computed = 0
        victim.request.preemptions += 1
        self.n_preemptions += 1
        self.waiting.appendleft(victim)

    def _has_row(self) -> bool:
        """Whether one more sequence may be open; parked ones are dropped for it."""
        while len(self.running) + len(self.parked) >= self.cache.plan.max_seqs:
            if not self.parked.drop_oldest():
                return False
        return True

    def _admit(self, sample: Sample, budget: int) -> int:
        """Tokens that the sample starts with; 0, and nothing changed, when there is no room for it now."""
        self.moving = sample
        adoption = self._start(sample)
        if adoption is None:
            return 0
        n = min(len(sample.tokens) - adoption.reused, self.max_chunk, budget)
        while not self.cache.reserve(sample.id, adoption.reused + n):
            if not self.parked.drop_oldest():
                self.cache.free(sample.id)
                return 0
        sample.computed = adoption.reused
        if sample.request.adoption is None:
            sample.request.adoption = adoption
        return n

    def _start(self, sample: Sample) -> Adoption | None:
        """Open its sequence, or resume the one that its conversation parked; None when all rows are taken."""
        request = sample.request
        counted = request.adoption is None  # one request is one query, whatever happens to it later
        if sample.index == 0 and (parked := self.parked.take(request.conversation)):
            sample.id = parked.id
            return self.cache.resume(parked.id, parked.tokens, sample.tokens, counted)
        if not self._has_row():
            return None
        self.cache.open(sample.id, request.salt, request.priority)
        return self.cache.adopt(sample.id, sample.tokens, counted)


def _work(sample: Sample, n: int) -> Work:
    return Work(sample, n, 1 if n == sample.missing else 0)
