"""Looks at engine and cache between two steps, on the engine's thread. What it costs grows with what changed.

Requests that have not started do not change, so they are looked at once.
"""

import time
from typing import NamedTuple

from kvarn.cache.journal import NOWHERE, Changes, GroupChanges
from kvarn.engine.request import Request
from kvarn.server.page.lanes import Lane, lane_of
from kvarn.server.worker import Audience, Ticket, Worker


class Counts(NamedTuple):
    """Counters since the start, except `running` and `waiting`. `computed`: prompt tokens, and those computed again
    after a preemption. Queries and hits count prompt tokens, misses count prompts."""

    running: int
    waiting: int
    decoded: int
    computed: int
    queries: int
    hits: int
    misses: dict[str, int]
    evicted: int
    preempted: int


class Observation(NamedTuple):
    time: float
    groups: list[GroupChanges]
    lanes: list[Lane]
    counts: Counts


class Observer(Audience):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._cache = worker.engine.cache
        self._seen: set[Ticket] = set()
        self._ended: list[Lane] = []

    def start(self) -> None:
        self._worker.audience = self
        self._cache.watching.start()

    def stop(self) -> None:
        self._worker.audience = Audience()
        self._cache.watching.stop()

    def ended(self, ticket: Ticket, request: Request) -> None:
        sample = request.samples[0]
        leaves = self._cache.watching.leaves(sample.tokens[: sample.furthest], request.salt)
        self._ended.append(_lane(ticket, request, tuple(leaves)))

    def look(self) -> Observation:
        changes = self._cache.watching.changes()
        ended, self._ended = self._ended, []
        return Observation(time.time(), changes.groups, [*self._lanes(changes), *ended], self._counts(changes))

    def _lanes(self, changes: Changes) -> list[Lane]:
        opened = self._worker.open
        new, self._seen = opened - self._seen, set(opened)
        lanes = []
        for ticket in opened:
            job = ticket.job
            if job is not None and (ticket in new or job.request.timing.started_at is not None):
                seq = job.request.samples[0].id
                leaves = tuple(group.leaves.get(seq, NOWHERE) for group in changes.groups)
                lanes.append(_lane(ticket, job.request, leaves))
        return lanes

    def _counts(self, changes: Changes) -> Counts:
        engine = self._worker.engine
        stats, scheduler = engine.stats, engine.scheduler
        return Counts(
            len(scheduler.running),
            len(scheduler.waiting),
            stats.generated_tokens,
            stats.prefill_tokens,
            changes.queries,
            changes.hits,
            changes.misses,
            changes.evicted,
            scheduler.n_preemptions,
        )


def _lane(ticket: Ticket, request: Request, leaves: tuple[int, ...]) -> Lane:
    return lane_of(request, ticket.submission.owner, ticket.submission.request_id, leaves)
