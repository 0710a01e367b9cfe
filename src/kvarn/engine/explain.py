"""Explains the work for a prompt: what it reused, what it computed, where and why reuse ended, and the time.

`explain` reads the facts from a request, in token ids. `to_json` and `in_words` need a function that
turns token ids into text. They quote an earlier prompt only if the cache returned its tokens, and the
cache does so only for the same salt. Non-goal: HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import Any

from kvarn.cache.adoption import Reason, ReuseLimit
from kvarn.engine.request import Request
from kvarn.words import counted

AROUND = 8  # tokens quoted before and after the place where two texts differ

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
    ours: tuple[int, ...]  # DIFFERS: the next tokens of our text
    prefill_ms: float  # time for the tokens that were not reused
    preemptions: int
    recomputed_tokens: int  # after preemptions
    recomputed_ms: float
    sampled: dict[str, int]  # tokens of the answer, by where: `device`, or why the host sampled them
    queued_ms: float | None  # time in the queue; these three are None for a stage that it did not reach
    first_token_ms: float | None
    total_ms: float | None

    @property
    def computed(self) -> int:
        return self.reached - self.reused


def explain(request: Request) -> Explanation:
    timing = request.timing
    reused, limit = request.adoption or (0, None)
    at = limit.at if limit is not None and limit.reason is Reason.DIFFERS else None
    computed = max((sample.furthest for sample in request.samples), default=0)

    def since_queued(moment: float | None) -> float | None:
        return None if moment is None else 1000 * (moment - timing.queued_at)

    return Explanation(
        prompt=len(request.prompt),
        reused=reused,
        reached=min(max(reused, computed), len(request.prompt)),
        cancelled=any(sample.finish_reason == "cancelled" for sample in request.samples),
        cut_by=min((sample.limit for sample in request.samples if sample.limit), default=None),  # context comes first
        limit=limit,
        before=() if at is None else tuple(request.prompt[max(at - AROUND, 0) : at]),
        ours=() if at is None else tuple(request.prompt[at : at + AROUND]),
        prefill_ms=1000 * timing.prefill_seconds,
        preemptions=request.preemptions,
        recomputed_tokens=timing.recomputed_tokens,
        recomputed_ms=1000 * timing.recomputed_seconds,
        sampled=dict(request.sampled),
        queued_ms=since_queued(timing.started_at),
        first_token_ms=since_queued(timing.first_token_at),
        total_ms=since_queued(timing.finished_at),
    )


def to_json(e: Explanation, spell: Spell) -> dict[str, Any]:
    return {
        "prompt_tokens": e.prompt,
        "reused_tokens": e.reused,
        "recomputed_tokens": e.computed,
        "recompute_ms": round(e.prefill_ms, 3),
        "reuse_ended": None if e.limit is None else _limit_to_json(e, e.limit, spell),
        "because": None if e.limit is None else _why(e, e.limit),
        "cancelled": e.cancelled,
        "cut_by": e.cut_by,
        "preemptions": e.preemptions,
        "recomputed_after_preemption": {"tokens": e.recomputed_tokens, "ms": round(e.recomputed_ms, 3)},
        "sampled": e.sampled,
        "queued_ms": _rounded(e.queued_ms),
        "first_token_ms": _rounded(e.first_token_ms),
        "total_ms": _rounded(e.total_ms),
        "summary": in_words(e, spell),
    }


def _limit_to_json(e: Explanation, limit: ReuseLimit, spell: Spell) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": limit.reason.value, "at": limit.at}
    if limit.reason is Reason.DIFFERS:
        facts["before"] = spell(e.before)
        facts["ours"] = {"token": limit.ours, "text": spell(e.ours[:1]), "onward": spell(e.ours)}
        if limit.theirs is not None:
            facts["theirs"] = {"token": limit.theirs, "text": spell(limit.onward[:1]), "onward": spell(limit.onward)}
    if limit.when is not None:
        facts["when"] = limit.when
    return facts


def without_texts(explanation: dict[str, Any]) -> dict[str, Any]:
    """A result of `to_json` without text and tokens of the prompt. It must not quote the earlier text, either."""
    ended = explanation["reuse_ended"]
    if ended is None:
        return explanation
    assert "theirs" not in ended, "the summary quotes both texts"
    facts = {name: fact for name, fact in ended.items() if name not in ("before", "ours")}
    return {**explanation, "reuse_ended": facts}


def in_words(e: Explanation, spell: Spell) -> str:
    """One sentence or two."""
    if e.limit is None:
        return f"{'cancelled' if e.cancelled else 'ended'} while queued: nothing was looked up or computed"
    text = f"reused {e.reused} of {counted(e.prompt, 'prompt token')}, computed {e.computed} in "
    text += f"{e.prefill_ms:.0f} ms: {_why(e, e.limit)}{_quoted_difference(e, e.limit, spell)}"
    if e.preemptions:
        again = f"{counted(e.recomputed_tokens, 'token')} in {e.recomputed_ms:.0f} ms"
        text += f"; preempted {counted(e.preemptions, 'time')}, which computed {again} again"
    if e.cancelled:
        missing = e.prompt - e.reached
        place = f"with {counted(missing, 'prompt token')} to go" if missing else "during its answer"
        text += f"; cancelled {place}"
    return text


def _why(e: Explanation, limit: ReuseLimit) -> str:
    lost = limit.at - e.reused
    known = counted(limit.at, "token") + (" was" if limit.at == 1 else " were")
    when = "" if limit.when is None else strftime(" at %H:%M:%S", localtime(limit.when))
    return {
        Reason.END: "everything was in the cache; the last token is always computed, for its logits"
        if e.prompt > 1
        else "a single token is always computed, for its logits",
        Reason.NEW: f"the earlier text ends at token {limit.at}, what follows is new",
        Reason.NOTHING_SHARED: "no earlier text begins like this one",
        Reason.DIFFERS: f"differs at token {limit.at} from the nearest earlier text",
        Reason.EVICTED: f"{known} known, {lost} of them evicted{when} to make room",
        Reason.OUT_OF_WINDOW: f"{known} known, but {lost} of them had left the window{when}",
        Reason.SHORT: f"{known} shared, {lost} of them in a block that was never filled and not kept",
        Reason.NOT_SHARING: "this cache strategy does not share prefixes; paged does",
        Reason.STATES: "the mean of the prompt's states was asked for, which needs the state of every token",
        Reason.LOGITS: "log-probabilities of the prompt were asked for, which need the logits of every token",
    }[limit.reason]


def _quoted_difference(e: Explanation, limit: ReuseLimit, spell: Spell) -> str:
    """Both texts around the place where they differ, if the caller may see the earlier one."""
    if limit.theirs is None:
        return ""
    before = _quote(spell(e.before))
    theirs, ours = (_quote(spell(tokens)) for tokens in (limit.onward, e.ours))
    return f": after {before} it continued {theirs} (token {limit.theirs}), now {ours} (token {limit.ours})"


def _quote(text: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{shown}"'


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
