"""Why a prompt was computed: what it reused, what it recomputed, where reuse stopped and why, and what that cost.

`explain` reads it off a request, in token ids; `to_json` and `in_words` are told how to spell them. The earlier text
that a prompt differed from is quoted only as far as the cache gave it, which it does within one salt. No HTTP in here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import Any

from kvarn.cache.placement import Reason, Stop
from kvarn.engine.request import Request

AROUND = 8  # tokens that are quoted before and behind the place where two texts part

Spell = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Explanation:
    prompt: int  # tokens
    reused: int
    reached: int  # reused or computed when it ended: all, unless it was cancelled or failed before
    cancelled: bool
    stop: Stop | None  # None: it ended before its turn came
    before: tuple[int, ...]  # DIFFERS: what both texts have just before they part
    ours: tuple[int, ...]  # DIFFERS: how ours goes on
    milliseconds: float  # that computing the rest took
    preemptions: int
    again_tokens: int  # computed again after preemptions
    again_milliseconds: float
    queued_ms: float | None  # None: it did not come that far
    first_token_ms: float | None
    total_ms: float | None

    @property
    def recomputed(self) -> int:
        return self.reached - self.reused


def explain(request: Request) -> Explanation:
    timing = request.timing
    reused, stop = request.adoption or (0, None)
    at = stop.at if stop is not None and stop.reason is Reason.DIFFERS else None
    computed = max((sample.furthest for sample in request.samples), default=0)

    def since_queued(moment: float | None) -> float | None:
        return None if moment is None else 1000 * (moment - timing.queued)

    return Explanation(
        prompt=len(request.prompt),
        reused=reused,
        reached=min(max(reused, computed), len(request.prompt)),
        cancelled=any(sample.finish_reason == "cancelled" for sample in request.samples),
        stop=stop,
        before=() if at is None else tuple(request.prompt[max(at - AROUND, 0) : at]),
        ours=() if at is None else tuple(request.prompt[at : at + AROUND]),
        milliseconds=1000 * timing.prompt_seconds,
        preemptions=request.preemptions,
        again_tokens=timing.again_tokens,
        again_milliseconds=1000 * timing.again_seconds,
        queued_ms=since_queued(timing.started),
        first_token_ms=since_queued(timing.answered),
        total_ms=since_queued(timing.finished),
    )


def to_json(found: Explanation, spell: Spell) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt,
        "reused_tokens": found.reused,
        "recomputed_tokens": found.recomputed,
        "recompute_ms": round(found.milliseconds, 3),
        "stop": None if found.stop is None else _stop_to_json(found, found.stop, spell),
        "cancelled": found.cancelled,
        "preemptions": found.preemptions,
        "recomputed_after_preemption": {"tokens": found.again_tokens, "ms": round(found.again_milliseconds, 3)},
        "queued_ms": _rounded(found.queued_ms),
        "first_token_ms": _rounded(found.first_token_ms),
        "total_ms": _rounded(found.total_ms),
        "summary": in_words(found, spell),
    }


def _stop_to_json(found: Explanation, stop: Stop, spell: Spell) -> dict[str, Any]:
    told: dict[str, Any] = {"reason": stop.reason.value, "at": stop.at}
    if stop.reason is Reason.DIFFERS:
        told["before"] = spell(found.before)
        told["ours"] = {"token": stop.ours, "text": spell(found.ours[:1]), "onward": spell(found.ours)}
        if stop.theirs is not None:
            told["theirs"] = {"token": stop.theirs, "text": spell(stop.onward[:1]), "onward": spell(stop.onward)}
    if stop.when is not None:
        told["when"] = stop.when
    return told


def in_words(found: Explanation, spell: Spell) -> str:
    """One sentence or two."""
    if found.stop is None:
        return f"{'cancelled' if found.cancelled else 'ended'} before its turn came: nothing was looked up or computed"
    text = f"reused {found.reused} of {found.prompt} prompt tokens, computed {found.recomputed} in "
    text += f"{found.milliseconds:.0f} ms: {_why(found, found.stop, spell)}"
    if found.preemptions:
        again = f"{found.again_tokens} tokens in {found.again_milliseconds:.0f} ms"
        text += f"; preempted {found.preemptions} times, which computed {again} again"
    if found.cancelled:
        missing = found.prompt - found.reached
        text += f"; cancelled {f'with {missing} prompt tokens to go' if missing else 'during its answer'}"
    return text


def _why(found: Explanation, stop: Stop, spell: Spell) -> str:
    lost = stop.at - found.reused
    when = "" if stop.when is None else strftime(" at %H:%M:%S", localtime(stop.when))
    if stop.reason is Reason.DIFFERS:
        return _difference(found, stop, spell)
    return {
        Reason.END: "everything was in the cache; the last token is always computed, for its logits"
        if found.prompt > 1
        else "a single token is always computed, for its logits",
        Reason.NEW: f"the earlier text ends at token {stop.at}, what follows is new",
        Reason.NOTHING_SHARED: "no earlier text begins like this one",
        Reason.EVICTED: f"{stop.at} tokens were known, {lost} of them evicted{when} to make room",
        Reason.OUT_OF_WINDOW: f"{stop.at} tokens were known, but {lost} of them had left the window{when}",
        Reason.SHORT: f"{stop.at} tokens are shared, {lost} of them in a block that was never filled and not kept",
        Reason.NOT_SHARING: "this cache strategy does not share prefixes; paged does",
    }[stop.reason]


def _difference(found: Explanation, stop: Stop, spell: Spell) -> str:
    place = f"differs at token {stop.at} from the nearest earlier text"
    if stop.theirs is None:
        return place
    before = _quote(spell(found.before))
    theirs, ours = (_quote(spell(tokens)) for tokens in (stop.onward, found.ours))
    return f"{place}: after {before} it went on {theirs} (token {stop.theirs}), now {ours} (token {stop.ours})"


def _quote(text: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{shown}"'


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
