"""A request as a lane: how long it waited, what it reused and computed, what it decoded. Numbers, no text.

A lane is made from a request of the engine, while it runs and at its end, or from a kept explanation.
"""

import time
from typing import Any, NamedTuple

from kvarn.engine.request import Request

_EPOCH = time.time() - time.perf_counter()  # when perf_counter was 0


class Lane(NamedTuple):
    """Times are seconds since the epoch, None for a stage that was not reached. Tokens of the prompt are reused, or
    computed, or still missing.

    number      of the request in the engine; those of earlier requests are negative
    leaves      of each group of layers: the node of the last full block, if known
    seqs        the sequences of its samples
    finish      why it ended; None: it has not
    """

    number: int
    owner: bytes
    request_id: str
    prompt: int
    reused: int
    computed: int
    decoded: int
    preempted: int
    queued: float
    started: float | None
    first: float | None
    finished: float | None
    leaves: tuple[int, ...]
    seqs: tuple[int, ...]
    finish: str | None

    def as_json(self) -> dict[str, Any]:
        """Without what names the key and the request."""
        facts = self._asdict()
        del facts["owner"], facts["request_id"]
        for name in ("queued", "started", "first", "finished"):
            facts[name] = None if facts[name] is None else round(facts[name], 3)
        return facts


def lane_of(request: Request, owner: bytes, request_id: str, leaves: tuple[int, ...]) -> Lane:
    timing, reused = request.timing, request.adoption.reused if request.adoption else 0
    done = request.done
    # After a preemption the prompt is computed again; it was computed once all the same.
    reached = max((max(sample.furthest, sample.computed) for sample in request.samples), default=0)
    prompt = len(request.prompt)

    def epoch(moment: float | None) -> float | None:
        return None if moment is None else _EPOCH + moment

    return Lane(
        request.id,
        owner,
        request_id,
        prompt,
        reused,
        max(min(reached, prompt) - reused, 0),
        sum(sample.n_output for sample in request.samples),
        request.preemptions,
        _EPOCH + timing.queued_at,
        epoch(timing.started_at),
        epoch(timing.first_token_at),
        epoch(timing.finished_at),
        leaves,
        tuple(sample.id for sample in request.samples),
        next((sample.finish_reason for sample in request.samples), None) if done else None,
    )


def earlier(explanation: dict[str, Any], number: int, owner: bytes, ended: float) -> Lane:
    """The lane of a kept explanation (`Records`)."""
    prompts = explanation.get("prompts", [explanation])
    queued = ended - max(each["total_ms"] or 0 for each in prompts) / 1000  # `created` has whole seconds

    def after(name: str) -> float | None:
        times = [each[name] for each in prompts if each[name] is not None]
        return queued + max(times) / 1000 if times else None

    return Lane(
        number,
        owner,
        explanation["request_id"],
        sum(each["prompt_tokens"] for each in prompts),
        sum(each["reused_tokens"] for each in prompts),
        sum(each["recomputed_tokens"] for each in prompts),
        sum(sum(each["sampled"].values()) for each in prompts),
        sum(each["preemptions"] for each in prompts),
        queued,
        after("queued_ms"),
        after("first_token_ms"),
        after("total_ms"),
        (),
        (),
        "cancelled" if any(each["cancelled"] for each in prompts) else "ended",
    )
