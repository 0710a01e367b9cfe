"""Why a prompt was computed: what it reused, what it recomputed, where reuse ended and why, and what that cost.

`explain` reads it off a request, in token ids; `to_json` and `in_words` take a function that spells token ids as text.
Text of an earlier prompt is quoted only if the cache returned it, which it does within one salt. No HTTP in here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import Any

from kvarn.cache.placement import Reason, ReuseLimit
from kvarn.engine.request import Request

AROUND = 8  # tokens quoted before and after the place where two texts differ

Spell = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Explanation:
    prompt: int  # tokens
    reused: int
    reached: int  # tokens reused or computed when it ended: all, unless it was cancelled or failed before
    cancelled: bool
    limit: ReuseLimit | None  # None: it ended while it was still queued
    before: tuple[int, ...]  # DIFFERS: what both texts have just before they differ
    ours: tuple[int, ...]  # DIFFERS: how ours continues
    prefill_ms: float  # for the tokens that were not reused
    preemptions: int
    recomputed_tokens: int  # after preemptions
    recomputed_ms: float
    queued_ms: float | None  # None: it did not get that far
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
        limit=limit,
        before=() if at is None else tuple(request.prompt[max(at - AROUND, 0) : at]),
        ours=() if at is None else tuple(request.prompt[at : at + AROUND]),
        prefill_ms=1000 * timing.prefill_seconds,
        preemptions=request.preemptions,
        recomputed_tokens=timing.recomputed_tokens,
        recomputed_ms=1000 * timing.recomputed_seconds,
        queued_ms=since_queued(timing.started_at),
        first_token_ms=since_queued(timing.first_token_at),
        total_ms=since_queued(timing.finished_at),
    )


def to_json(found: Explanation, spell: Spell) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt,
        "reused_tokens": found.reused,
        "recomputed_tokens": found.computed,
        "recompute_ms": round(found.prefill_ms, 3),
        "reuse_ended": None if found.limit is None else _limit_to_json(found, found.limit, spell),
        "because": None if found.limit is None else _why(found, found.limit),
        "cancelled": found.cancelled,
        "preemptions": found.preemptions,
        "recomputed_after_preemption": {"tokens": found.recomputed_tokens, "ms": round(found.recomputed_ms, 3)},
        "queued_ms": _rounded(found.queued_ms),
        "first_token_ms": _rounded(found.first_token_ms),
        "total_ms": _rounded(found.total_ms),
        "summary": in_words(found, spell),
    }


def _limit_to_json(found: Explanation, limit: ReuseLimit, spell: Spell) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": limit.reason.value, "at": limit.at}
    if limit.reason is Reason.DIFFERS:
        facts["before"] = spell(found.before)
        facts["ours"] = {"token": limit.ours, "text": spell(found.ours[:1]), "onward": spell(found.ours)}
        if limit.theirs is not None:
            facts["theirs"] = {"token": limit.theirs, "text": spell(limit.onward[:1]), "onward": spell(limit.onward)}
    if limit.when is not None:
        facts["when"] = limit.when
    return facts


def in_words(found: Explanation, spell: Spell) -> str:
    """One sentence or two."""
    if found.limit is None:
        return f"{'cancelled' if found.cancelled else 'ended'} while queued: nothing was looked up or computed"
    text = f"reused {found.reused} of {found.prompt} prompt tokens, computed {found.computed} in "
    text += f"{found.prefill_ms:.0f} ms: {_why(found, found.limit)}{_quoted_difference(found, found.limit, spell)}"
    if found.preemptions:
        again = f"{found.recomputed_tokens} tokens in {found.recomputed_ms:.0f} ms"
        text += f"; preempted {found.preemptions} times, which computed {again} again"
    if found.cancelled:
        missing = found.prompt - found.reached
        text += f"; cancelled {f'with {missing} prompt tokens to go' if missing else 'during its answer'}"
    return text


def _why(found: Explanation, limit: ReuseLimit) -> str:
    lost = limit.at - found.reused
    when = "" if limit.when is None else strftime(" at %H:%M:%S", localtime(limit.when))
    return {
        Reason.END: "everything was in the cache; the last token is always computed, for its logits"
        if found.prompt > 1
        else "a single token is always computed, for its logits",
        Reason.NEW: f"the earlier text ends at token {limit.at}, what follows is new",
        Reason.NOTHING_SHARED: "no earlier text begins like this one",
        Reason.DIFFERS: f"differs at token {limit.at} from the nearest earlier text",
        Reason.EVICTED: f"{limit.at} tokens were known, {lost} of them evicted{when} to make room",
        Reason.OUT_OF_WINDOW: f"{limit.at} tokens were known, but {lost} of them had left the window{when}",
        Reason.SHORT: f"{limit.at} tokens are shared, {lost} of them in a block that was never filled and not kept",
        Reason.NOT_SHARING: "this cache strategy does not share prefixes; paged does",
    }[limit.reason]


def _quoted_difference(found: Explanation, limit: ReuseLimit, spell: Spell) -> str:
    """Both texts around the place where they differ, if the earlier one may be shown."""
    if limit.theirs is None:
        return ""
    before = _quote(spell(found.before))
    theirs, ours = (_quote(spell(tokens)) for tokens in (limit.onward, found.ours))
    return f": after {before} it continued {theirs} (token {limit.theirs}), now {ours} (token {limit.ours})"


def _quote(text: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{shown}"'


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
