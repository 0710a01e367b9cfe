"""Compares a request with an earlier response that the client names, and says what changed in the vendors' forms.

The comparison needs only hashes of the earlier chat (outlines.py). What the cache did comes from the request itself.
"""

from typing import NamedTuple

from kvarn.cache.adoption import Adoption, Reason
from kvarn.server.outlines import SIZE, Outline
from kvarn.server.schema import Json

REUSED = (Reason.END, Reason.NEW, Reason.TILE)  # nothing that could be reused was computed
CHANGED = (Reason.DIFFERS, Reason.NOTHING_SHARED)  # a change may have ended reuse, and not the loss of blocks
OPENAI = {"tools": "tools_changed", "settings": "reasoning_effort_changed"}
ANTHROPIC = {"tools": "tools_changed", "system": "system_changed"}


class Comparison(NamedTuple):
    """
    found       whether the earlier response is known, and of this key
    changed     the first of tools, system, settings and turns that is not the same; empty if all are
    n_tokens    of the earlier prompt and its answer
    """

    found: bool = False
    changed: str = ""
    n_tokens: int = 0

    def missed(self, adoption: Adoption, n_prompt: int) -> int:
        """Prompt tokens that were computed although the earlier response was as long."""
        return max(min(self.n_tokens, n_prompt) - adoption.reused, 0)


def compare(now: Outline, then: Outline | None) -> Comparison:
    return Comparison() if then is None else Comparison(True, _changed(now, then), then.n_tokens)


def _changed(now: Outline, then: Outline) -> str:
    if now.tools != then.tools:
        return "tools"
    same = now.same_turns(then)
    if same < max(now.n_system, then.n_system):
        return "system"
    if now.settings != then.settings:
        return "settings"
    return "" if same == min(len(now.turns), len(then.turns)) // SIZE else "turns"


def openai_diagnostics(comparison: Comparison | None, adoption: Adoption | None, n_prompt: int) -> Json:
    """`prompt_cache_diagnostics` of an answer. `comparison`: None if only chats can be compared."""
    if comparison is None or adoption is None:
        return {"type": "unavailable"}
    if not comparison.found:
        return {"type": "comparison_response_not_found"}
    if adoption.limit.reason in REUSED:
        return {"type": "cache_hit"}
    if not comparison.changed or adoption.limit.reason not in CHANGED:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": OPENAI.get(comparison.changed, "input_changed"),
        "cache_missed_tokens": comparison.missed(adoption, n_prompt),
        "comparison_reusable_tokens": comparison.n_tokens,
    }


def anthropic_diagnostics(comparison: Comparison | None, adoption: Adoption | None, n_prompt: int) -> Json:
    """`diagnostics` of an answer. `comparison`: None if there is no earlier message."""
    if comparison is None:
        return {"cache_miss_reason": None}
    if not comparison.found:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if adoption is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    if adoption.limit.reason in REUSED:
        return {"cache_miss_reason": None}
    if not comparison.changed or adoption.limit.reason not in CHANGED:
        return {"cache_miss_reason": {"type": "unavailable"}}
    kind = ANTHROPIC.get(comparison.changed, "messages_changed")
    missed = comparison.missed(adoption, n_prompt)
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": missed}}
