"""Which samples move in the next step, and by how many tokens.

Every sample that moves has its room reserved here. Those that decode go first, so that a long prompt never makes them
wait; prompts fill what is left of the step's token budget, in chunks. When there is no room the newest sample is
preempted: its blocks are freed and it waits to be computed again, which gives the same tokens. Token ids only.
"""

from collections import deque
from typing import NamedTuple

from kvarn.cache.cache import KVCache
from kvarn.request import Sample


class Work(NamedTuple):
    sample: Sample
    n: int  # new tokens in this step


class Scheduler:
    def __init__(self, cache: KVCache, max_batch_tokens: int) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_chunk = cache.plan.groups[0].geometry.max_chunk
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []  # oldest first
        self.n_preemptions = 0

    def add(self, sample: Sample) -> None:
        self.waiting.append(sample)

    def adopt_fork(self, parent: Sample, child: Sample) -> None:
        """`child` starts where the parent's computed tokens end; where it cannot, it waits its turn like any other."""
        if len(self.running) < self.cache.plan.max_seqs and self.cache.fork(parent.id, child.id):
            child.computed = parent.computed
            self.running.append(child)
        else:
            self.waiting.append(child)

    def remove(self, sample: Sample) -> None:
        """Finished or cancelled: its blocks go back."""
        if sample in self.running:
            self.running.remove(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)
        self.cache.free(sample.id)

    def schedule(self) -> list[Work]:
        work: dict[Sample, int] = {}
        budget = self.max_batch_tokens
        preempted = self.n_preemptions
        for sample in sorted(self.running, key=lambda s: s.missing > 1):  # stable: decodes first, each by age
            n = min(sample.missing, self.max_chunk, budget)
            if n and sample in self.running and self._reserve(sample, n, work):
                work[sample] = n
                budget -= n
        while budget and self.waiting and self.n_preemptions == preempted:
            n = self._admit(self.waiting[0], budget)
            if not n:
                break
            sample = self.waiting.popleft()
            self.running.append(sample)
            work[sample] = n
            budget -= n
        return [Work(sample, n) for sample, n in work.items()]

    def _reserve(self, sample: Sample, n: int, work: dict[Sample, int]) -> bool:
        while not self.cache.reserve(sample.id, sample.computed + n):
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

    def _admit(self, sample: Sample, budget: int) -> int:
        """Tokens that the sample starts with; 0, and nothing changed, when there is no room for it now."""
        if len(self.running) >= self.cache.plan.max_seqs:
            return 0
        self.cache.open(sample.id, sample.request.salt)
        adoption = self.cache.adopt(sample.id, sample.tokens)
        n = min(len(sample.tokens) - adoption.reused, self.max_chunk, budget)
        if not self.cache.reserve(sample.id, adoption.reused + n):
            self.cache.free(sample.id)
            return 0
        sample.computed = adoption.reused
        if sample.request.adoption is None:
            sample.request.adoption = adoption
        return n
