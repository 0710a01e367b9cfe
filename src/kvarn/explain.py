"""Why a prompt was computed: what it reused, what it recomputed, where reuse stopped and why, and what that cost.

`explain` reads it off a request, in token ids; `to_json` and `in_words` are told how to spell them. The earlier text
that a prompt differed from is quoted only as far as the cache gave it, which it does within one salt. No HTTP in here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import Any

from kvarn.cache.placement import Adoption, Reason, Stop
from kvarn.request import Request

AROUND = 8  # tokens that are quoted before and behind the place where two texts part
NEVER_STARTED = Adoption(0, Stop(Reason.NOTHING_SHARED, 0))

Spell = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Explanation:
    prompt: int  # tokens
    reused: int
    stop: Stop
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
        return self.prompt - self.reused


def explain(request: Request) -> Explanation:
    timing = request.timing
    reused, stop = request.adoption or NEVER_STARTED
    parts = stop.reason is Reason.DIFFERS

    def since_queued(moment: float | None) -> float | None:
        return None if moment is None else 1000 * (moment - timing.queued)

    return Explanation(
        prompt=len(request.prompt),
        reused=reused,
        stop=stop,
        before=tuple(request.prompt[max(stop.at - AROUND, 0) : stop.at]) if parts else (),
        ours=tuple(request.prompt[stop.at : stop.at + AROUND]) if parts else (),
        milliseconds=1000 * timing.prompt_seconds,
        preemptions=request.preemptions,
        again_tokens=timing.again_tokens,
        again_milliseconds=1000 * timing.again_seconds,
        queued_ms=since_queued(timing.started),
        first_token_ms=since_queued(timing.answered),
        total_ms=since_queued(timing.finished),
    )


def to_json(found: Explanation, spell: Spell) -> dict[str, Any]:
    stop: dict[str, Any] = {"reason": found.stop.reason.value, "at": found.stop.at}
    if found.stop.reason is Reason.DIFFERS:
        stop["before"] = spell(found.before)
        stop["ours"] = {"token": found.stop.ours, "text": spell(found.ours[:1]), "onward": spell(found.ours)}
        if found.stop.theirs is not None:
            theirs = found.stop.onward
            stop["theirs"] = {"token": found.stop.theirs, "text": spell(theirs[:1]), "onward": spell(theirs)}
    if found.stop.when is not None:
        stop["when"] = found.stop.when
    return {
        "prompt_tokens": found.prompt,
        "reused_tokens": found.reused,
        "recomputed_tokens": found.recomputed,
        "recompute_ms": round(found.milliseconds, 3),
        "stop": stop,
        "preemptions": found.preemptions,
        "recomputed_after_preemption": {"tokens": found.again_tokens, "ms": round(found.again_milliseconds, 3)},
        "queued_ms": _rounded(found.queued_ms),
        "first_token_ms": _rounded(found.first_token_ms),
        "total_ms": _rounded(found.total_ms),
        "summary": in_words(found, spell),
    }


def in_words(found: Explanation, spell: Spell) -> str:
    """One sentence or two."""
    text = f"reused {found.reused} of {found.prompt} prompt tokens, computed {found.recomputed} in "
    text += f"{found.milliseconds:.0f} ms: {_why(found, spell)}"
    if found.preemptions:
        again = f"{found.again_tokens} tokens in {found.again_milliseconds:.0f} ms"
        text += f"; preempted {found.preemptions} times, which computed {again} again"
    return text


def _why(found: Explanation, spell: Spell) -> str:
    stop, lost = found.stop, found.stop.at - found.reused
    when = "" if stop.when is None else strftime(" at %H:%M:%S", localtime(stop.when))
    if stop.reason is Reason.DIFFERS:
        return _difference(found, spell)
    return {
        Reason.END: "everything was in the cache; the last token is always computed, for its logits",
        Reason.NEW: f"the earlier text ends at token {stop.at}, what follows is new",
        Reason.NOTHING_SHARED: "no earlier text begins like this one",
        Reason.EVICTED: f"{stop.at} tokens were known, {lost} of them evicted{when} to make room",
        Reason.OUT_OF_WINDOW: f"{stop.at} tokens were known, but {lost} of them had left the window{when}",
        Reason.SHORT: f"{stop.at} tokens are shared, {lost} of them in a block that was never filled and not kept",
        Reason.NOT_SHARING: "this cache strategy does not share prefixes; paged does",
    }[stop.reason]


def _difference(found: Explanation, spell: Spell) -> str:
    stop = found.stop
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
