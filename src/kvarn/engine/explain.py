"""Explains the work for a prompt: what it reused, what it computed, where and why reuse ended, and the time.

`explain` reads the facts from a request, in token ids. `to_json` and `in_words` need a function that
turns token ids into text. They quote an earlier prompt only if the cache returned its tokens, and the
cache does so only for the same salt. Non-goals: HTTP; sentences (because.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.cache.adoption import NOT_FETCHED, Fetched, Reason, ReuseLimit
from kvarn.engine.because import because, remedy, summary
from kvarn.engine.difference import Cause, Difference
from kvarn.engine.request import Request
from kvarn.engine.sources import Source

AROUND = 8  # tokens quoted before and after the place where two texts differ
AHEAD = 24  # of our text: tokens from there on, to find out why

Spell = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Explanation:
    prompt: int  # tokens
    reused: int
    reached: int  # prompt tokens reused or computed at the end; fewer than `prompt` if it was cancelled or failed
    cancelled: bool
    cut_by: str | None  # the limit that ended an answer: context or max_tokens
    limit: ReuseLimit | None  # None: it ended in the queue
    before: tuple[int, ...]  # DIFFERS: the last tokens that both texts have
    ours: tuple[int, ...]  # DIFFERS: the next tokens of our text; more than are quoted
    prefill_ms: float  # time for the tokens that were not reused
    preemptions: int
    recomputed_tokens: int  # after preemptions
    recomputed_ms: float
    sampled: dict[str, int]  # tokens of the answer, by where: `device`, or why the host sampled them
    queued_ms: float | None  # time in the queue; these three are None for a stage that it did not reach
    first_token_ms: float | None
    total_ms: float | None
    fetched: Fetched = NOT_FETCHED  # those of the reused tokens that came from tiers
    source: Source | None = None  # the snapshot that gave reused tokens
    difference: Difference | None = None  # DIFFERS: what else is known about it

    @property
    def computed(self) -> int:
        return self.reached - self.reused


def explain(request: Request) -> Explanation:
    timing = request.timing
    reused, limit = request.adoption or (0, None)
    at = limit.at if limit is not None and limit.reason is Reason.DIFFERS else None
    known = len(request.prompt) + request.n_begun
    computed = max((sample.furthest for sample in request.samples), default=0)

    def since_queued(moment: float | None) -> float | None:
        return None if moment is None else 1000 * (moment - timing.queued_at)

    return Explanation(
        prompt=known,
        reused=reused,
        reached=min(max(reused, computed), known),
        cancelled=any(sample.finish_reason == "cancelled" for sample in request.samples),
        cut_by=min((sample.limit for sample in request.samples if sample.limit), default=None),  # context comes first
        limit=limit,
        before=() if at is None else tuple(request.prompt[max(at - AROUND, 0) : at]),
        ours=() if at is None else tuple(request.prompt[at : at + AHEAD]),
        prefill_ms=1000 * timing.prefill_seconds,
        preemptions=request.preemptions,
        recomputed_tokens=timing.recomputed_tokens,
        recomputed_ms=1000 * timing.recomputed_seconds,
        fetched=request.fetched,
        sampled=dict(request.sampled),
        queued_ms=since_queued(timing.started_at),
        first_token_ms=since_queued(timing.first_token_at),
        total_ms=since_queued(timing.finished_at),
        source=request.source,
    )


def to_json(e: Explanation, spell: Spell) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": e.prompt,
        "reused_tokens": e.reused,
        "fetched": {
            "host": {"tokens": e.fetched.host_tokens, "ms": round(1000 * e.fetched.host_seconds, 3)},
            "disk": {"tokens": e.fetched.disk_tokens, "ms": round(1000 * e.fetched.disk_seconds, 3)},
        },
        **({} if e.source is None else {"snapshot": source_to_json(e.source)}),
        "recomputed_tokens": e.computed,
        "recompute_ms": round(e.prefill_ms, 3),
        "reuse_ended": None if e.limit is None else _limit_to_json(e, e.limit, spell),
        "because": None,
        "cancelled": e.cancelled,
        "cut_by": e.cut_by,
        "preemptions": e.preemptions,
        "recomputed_after_preemption": {"tokens": e.recomputed_tokens, "ms": round(e.recomputed_ms, 3)},
        "sampled": e.sampled,
        "queued_ms": _rounded(e.queued_ms),
        "first_token_ms": _rounded(e.first_token_ms),
        "total_ms": _rounded(e.total_ms),
    }
    return found | {"because": because(found), "summary": summary(found)}


def source_to_json(source: Source) -> dict[str, Any]:
    return {"name": source.name, "tokens": source.tokens, "read_ms": round(1000 * source.seconds, 3)}


def _limit_to_json(e: Explanation, limit: ReuseLimit, spell: Spell) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": limit.reason.value, "at": limit.at}
    if limit.reason is Reason.DIFFERS:
        facts |= _difference_to_json(e.difference or Difference(), quotes=limit.theirs is not None)
        facts["before"] = spell(e.before)
        facts["ours"] = _onward(limit.ours, e.ours, spell)
        if limit.theirs is not None:
            facts["theirs"] = _onward(limit.theirs, limit.onward, spell)
    if limit.when is not None:
        facts["when"] = limit.when
    if (advice := remedy(facts)) is not None:
        facts["remedy"] = advice
    return facts


def _onward(token: int | None, tokens: Sequence[int], spell: Spell) -> dict[str, Any]:
    return {"token": token, "text": spell(tokens[:1]), "onward": spell(tokens[:AROUND])}


def _difference_to_json(d: Difference, quotes: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if d.cause is not None:
        facts["reason"] = d.cause.value
    if d.kind is not None:
        facts["kind"] = d.kind.value
    if d.part:
        facts["part"] = {"name": d.part} | ({"turn": d.turn, "role": d.role} if d.part == "turn" else {})
    if d.character is not None:
        facts["character"] = d.character
    if d.line:
        facts["line"] = d.line
    if d.cause is Cause.SAME_TEXT:
        ours, theirs = map(list, d.tokens)
        facts["tokens"] = {"ours": ours} | ({"theirs": theirs} if quotes else {})
    return facts


def without_texts(explanation: dict[str, Any]) -> dict[str, Any]:
    """A result of `to_json` without text and tokens of the prompt. It must not quote the earlier text, either."""
    ended = explanation["reuse_ended"]
    if ended is None:
        return explanation
    assert "theirs" not in ended, "the summary quotes both texts"
    facts = {name: fact for name, fact in ended.items() if name not in ("before", "ours", "line", "tokens")}
    return {**explanation, "reuse_ended": facts}


def in_words(e: Explanation, spell: Spell) -> str:
    """One sentence or two."""
    return str(to_json(e, spell)["summary"])


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
