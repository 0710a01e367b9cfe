"""The scheduler: chooses the samples of the next step and their numbers of tokens, and reserves room.

- Decoding samples come first, so a long prompt never delays them.
- Prompts fill the rest of the step's token budget in chunks. While samples decode, the chunks are
  small, which limits the gap between two tokens (EngineConfig.chunk_while_decoding).
- If there is no room, the newest sample is preempted: its blocks are freed, and it waits in the queue.
  It is recomputed later and gives the same tokens.
- After a failed step, its samples run one at a time (faults.py).
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.cache import KVCache
from kvarn.engine.config import EngineConfig
from kvarn.engine.faults import OneByOne
from kvarn.engine.parked import ParkedSequences
from kvarn.engine.request import Sample

# Rows of prompt logits in a step, of all its samples: a row has one number per token of the vocabulary, and each is
# reported on the host. The second number is for steps in which other samples decode.
MOST_ROWS, MOST_ROWS_WHILE_DECODING = 64, 16


class Work(NamedTuple):
    """The part of a step that one sample has."""

    sample: Sample
    n: int  # tokens to compute
    n_rows: int  # how many of the last of them need logits

    @property
    def decodes(self) -> bool:
        """Whether it computes one sampled token and nothing else."""
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
        self.moving: Sample | None = None  # the sample that `schedule` works on: an error there fails its request
        self._one_by_one = OneByOne()
        self._rows_left = MOST_ROWS  # of the step that is being chosen
        self.n_preemptions = 0

    def add(self, sample: Sample) -> None:
        self.waiting.append(sample)

    def adopt_fork(self, parent: Sample, child: Sample) -> None:
        """Start `child` as a fork of the parent. If there is no room for a fork, `child` waits in the queue."""
        child.furthest = parent.computed
        if self._has_row() and self.cache.fork(parent.id, child.id):
            child.computed = parent.computed
            self.running.append(child)
        else:
            self.waiting.append(child)

    def remove(self, sample: Sample) -> None:
        """The sample finished or was cancelled: free its sequence, or park it for the next turn."""
        if sample in self.running:
            self.running.remove(sample)
            conversation = sample.request.conversation if sample.index == 0 else None
            self.parked.park(conversation, sample.id, sample.tokens[: sample.computed])
        elif sample in self.waiting:
            self.waiting.remove(sample)
            self.cache.free(sample.id)  # it is open only if an error interrupted its admission

    def schedule(self) -> list[Work]:
        self.moving = None
        work = self._choose()
        self.moving = None
        return work

    def _choose(self) -> list[Work]:
        decodes = any(sample.missing == 1 for sample in self.running)
        self._rows_left = MOST_ROWS_WHILE_DECODING if decodes else MOST_ROWS
        if alone := self._one_by_one.next():
            return self._run_alone(alone)
        work: dict[Sample, int] = {}
        budget = self._continue(work)
        while budget and self.waiting:
            n = self._admit(self.waiting[0], budget)
            if not n:
                break
            budget -= self._put(self._enter(self.waiting[0]), n, work)
        return [_work(sample, n) for sample, n in work.items()]

    def _put(self, sample: Sample, n: int, work: dict[Sample, int]) -> int:
        work[sample] = n
        self._rows_left -= n if _asks_for_rows(sample) else 0
        return n

    def _continue(self, work: dict[Sample, int]) -> int:
        """Add the running samples to `work`, decoding ones first, oldest first. Return the token budget that is left
        for waiting samples."""
        budget, preempted = self.max_batch_tokens, self.n_preemptions
        decoding = [sample for sample in self.running if sample.missing == 1]
        prompts = [sample for sample in self.running if sample.missing > 1]
        for group in (decoding, prompts):
            for sample in group:
                n = min(sample.missing, self._most(sample), budget)
                if n and sample in self.running and self._reserve(sample, n, work):
                    budget -= self._put(sample, n, work)
            if decoding:
                budget = min(budget, self._chunk_while_decoding)
        return budget if self.n_preemptions == preempted else 0

    def _enter(self, sample: Sample) -> Sample:
        self.waiting.remove(sample)
        self.running.append(sample)
        return sample

    def steady(self, samples: Container[Sample]) -> bool:
        """Whether the next step has only samples of these."""
        return not self.waiting and self._one_by_one.next() is None and all(each in samples for each in self.running)

    def isolate(self) -> None:
        """A step failed for an unknown request: preempt all running samples and run each of them alone."""
        for sample in reversed(list(self.running)):
            self._preempt(sample)
            self._one_by_one.put_first(sample)

    def restart(self, samples: Sequence[Sample]) -> None:
        """The cache is empty: queue these samples and no others, and run each of them alone."""
        self.moving = None
        self.running.clear()
        self.parked.clear()
        self.waiting = deque(samples)
        self._one_by_one = OneByOne(samples)
        for sample in samples:
            if sample.computed:
                sample.request.preemptions += 1
                self.n_preemptions += 1
            sample.computed = 0

    def recompute(self, seqs: Container[int]) -> None:
        """Preempt the samples of these sequences, whose cells were lost with a dropped step."""
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
                n = min(sample.missing, self._most(sample), self.max_batch_tokens)
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

    def _most(self, sample: Sample) -> int:
        """Most tokens of the sample in one step."""
        return min(self.max_chunk, self._rows_left) if _asks_for_rows(sample) else self.max_chunk

    def _preempt(self, victim: Sample) -> None:
        self.running.remove(victim)
        self.cache.free(victim.id)
        victim.computed = 0
        victim.request.preemptions += 1
        self.n_preemptions += 1
        self.waiting.appendleft(victim)

    def _has_row(self) -> bool:
        """Whether one more sequence can be opened. Drops parked sequences if that is necessary."""
        while len(self.running) + len(self.parked) >= self.cache.plan.max_seqs:
            if not self.parked.drop_oldest():
                return False
        return True

    def _admit(self, sample: Sample, budget: int) -> int:
        """Open the sample's sequence and reserve its first chunk. Return the number of tokens of the chunk; 0, with no
        change, if there is no room now."""
        self.moving = sample
        adoption = self._start(sample) if self._most(sample) else None
        if adoption is None:
            return 0
        n = min(len(sample.tokens) - adoption.reused, self._most(sample), budget)
        while not self.cache.reserve(sample.id, adoption.reused + n):
            if not self.parked.drop_oldest():
                self.cache.free(sample.id)
                return 0
        sample.computed = adoption.reused
        if sample.request.adoption is None:
            sample.request.adoption = adoption
        return n

    def _start(self, sample: Sample) -> Adoption | None:
        """Open the sample's sequence, or resume the parked one of its conversation. None if all rows are in use."""
        request = sample.request
        asks = _asks_for_rows(sample)
        counted = request.adoption is None and not asks  # one query per request, even if it is preempted
        known = sample.tokens[: request.n_reusable + 1] if asks else sample.tokens
        if sample.index == 0 and (parked := self.parked.take(request.conversation)):
            sample.id = parked.id
            adoption = self.cache.resume(parked.id, parked.tokens, known, counted)
        elif self._has_row():
            self.cache.open(sample.id, request.salt, request.priority)
            adoption = self.cache.adopt(sample.id, known, counted)
        else:
            return None
        if not asks:
            return adoption
        why = Reason.LOGITS if request.pool is None else Reason.STATES
        return Adoption(adoption.reused, ReuseLimit(why, adoption.reused))


def _asks_for_rows(sample: Sample) -> bool:
    """Whether logits or states of prompt tokens are missing. The first sample computes them."""
    request = sample.request
    return sample.index == 0 and request.n_reusable < len(request.prompt)


def _work(sample: Sample, n: int) -> Work:
    return Work(sample, n, n if _asks_for_rows(sample) else int(n == sample.missing))
