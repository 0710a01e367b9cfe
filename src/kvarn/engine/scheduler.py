"""The scheduler: chooses the samples of the next step and their numbers of tokens, and reserves room.

- Decoding samples come first, so a long prompt never delays them.
- Prompts fill the rest of the step's token budget in chunks. While samples decode, the chunks are
  small, which limits the gap between two tokens (EngineConfig.chunk_while_decoding).
- If there is no room, the newest sample is preempted: its blocks are freed, and it waits in the queue.
  It is recomputed later and gives the same tokens.
- A prompt whose blocks are in a tier enters without work. It is computed when they have arrived (recall.py).
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
from kvarn.engine.recall import NO_TIERS, Found, Recall, Tiers
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
    def __init__(self, cache: KVCache, config: EngineConfig, tiers: Tiers = NO_TIERS) -> None:
        self.cache = cache
        self.recall = Recall(tiers)
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
        """Start `child` as a fork of the parent, with as many computed tokens as the cache can give it. If there is no
        room for a fork, `child` waits in the queue."""
        child.furthest = parent.computed
        if self._has_row() and self.cache.fork(parent.id, child.id):
            child.computed = self.cache.length(child.id)
            self.running.append(child)
        else:
            self.waiting.append(child)

    def remove(self, sample: Sample) -> None:
        """The sample finished or was cancelled: free its sequence, or park it for the next turn."""
        self.recall.end(sample)
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
        self._take_fetched()
        work: dict[Sample, int] = {}
        budget = self._continue(work)
        while budget and self.waiting:
            n = self._admit(self.waiting[0], budget)
            if n is None:
                break
            budget -= self._put(self._enter(self.waiting[0]), n, work)
        return [_work(sample, n) for sample, n in work.items()]

    def _put(self, sample: Sample, n: int, work: dict[Sample, int]) -> int:
        if n:
            work[sample] = n
            self._rows_left -= n if _asks_for_rows(sample) else 0
        return n

    def _take_fetched(self) -> None:
        """Adopt what tiers have given. This comes before the first `reserve`: a pending copy could name a block that
        is planted."""
        for sample in [sample for sample in self.running if sample in self.recall]:
            self.moving = sample
            if self.recall.advance(sample):
                _computed(sample, self._adopt(sample))

    def _continue(self, work: dict[Sample, int]) -> int:
        """Add the running samples to `work`, decoding ones first, oldest first. Return the token budget that is left
        for waiting samples."""
        budget, preempted = self.max_batch_tokens, self.n_preemptions
        ready = [sample for sample in self.running if sample not in self.recall]
        decoding = [sample for sample in ready if sample.missing == 1]
        prompts = [sample for sample in ready if sample.missing > 1]
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
        self.recall.clear()
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
                if n := self._admit(sample, self.max_batch_tokens, fetches=False):
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
        self.recall.end(victim)
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

    def _admit(self, sample: Sample, budget: int, fetches: bool = True) -> int | None:
        """Open the sample's sequence and reserve its first chunk. Return the number of tokens of the chunk; 0 if blocks
        from tiers come first; None, with no change, if there is no room now."""
        self.moving = sample
        if not self._most(sample):
            return None
        if sample.index == 0 and (parked := self.parked.take(sample.request.conversation)):
            sample.id = parked.id
            adoption = self.cache.resume(parked.id, parked.tokens, _known(sample), _counts(sample))
        elif self._has_row():
            self.cache.open(sample.id, sample.request.salt, sample.request.priority)
            begun, crowded = Found.NOTHING, bool(self.running)
            if fetches:
                begun = self.recall.begin(sample, _known(sample), self._most(sample), crowded)
            if begun is Found.READING:
                return 0
            if begun is Found.NO_ROOM and crowded:
                self.cache.free(sample.id)
                return None
            adoption = self._adopt(sample)
        else:
            return None
        n = min(len(sample.tokens) - adoption.reused, self._most(sample), budget)
        while not self.cache.reserve(sample.id, adoption.reused + n):
            if not self.parked.drop_oldest():
                self.cache.free(sample.id)
                return None
        _computed(sample, adoption)
        return n

    def _adopt(self, sample: Sample) -> Adoption:
        """Reuse what the cache has of the sample's tokens, and what tiers have given."""
        fetched = self.recall.end(sample)
        if sample.request.adoption is None:
            sample.request.fetched = fetched
        return self.cache.adopt(sample.id, _known(sample), _counts(sample), fetched)


def _known(sample: Sample) -> list[int]:
    """The tokens of which the cache may have some."""
    return sample.tokens[: sample.request.n_reusable + 1] if _asks_for_rows(sample) else sample.tokens


def _counts(sample: Sample) -> bool:
    """Whether its lookup counts: once per request, even if it is preempted."""
    return sample.request.adoption is None and not _asks_for_rows(sample)


def _computed(sample: Sample, adoption: Adoption) -> None:
    """The sample starts with what it reuses."""
    request = sample.request
    if _asks_for_rows(sample):
        why = Reason.LOGITS if request.pool is None else Reason.STATES
        adoption = Adoption(adoption.reused, ReuseLimit(why, adoption.reused))
    sample.computed = adoption.reused
    if request.adoption is None:
        request.adoption = adoption


def _asks_for_rows(sample: Sample) -> bool:
    """Whether logits or states of prompt tokens are missing. The first sample computes them."""
    request = sample.request
    return sample.index == 0 and request.n_reusable < len(request.prompt)


def _work(sample: Sample, n: int) -> Work:
    return Work(sample, n, n if _asks_for_rows(sample) else int(n == sample.missing))
