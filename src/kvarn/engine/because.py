"""The English of explanations. It is made here and nowhere else, from the fields of their JSON.

So a client of the server can say the same (`kvarn explain` does), and no program must read our sentences.
Imports nothing heavy.
"""

from collections.abc import Callable, Mapping
from time import localtime, strftime
from typing import Any

from kvarn.cache.adoption import Reason
from kvarn.engine.difference import Cause, Kind
from kvarn.words import counted

Facts = Mapping[str, Any]
CONTINUE = "continue the stored response (previous_response_id of /v1/responses): it keeps the very tokens"
LOOKS_LIKE = {
    Kind.CLOCK: "a time of day",
    Kind.DATE: "a date",
    Kind.COUNTER: "a number",
    Kind.HASH: "a hash or a random id",
    Kind.CLIENT_STAMP: "a stamp that Claude Code writes into each request",
}


def because(found: Facts) -> str | None:
    """Why reuse ended. `found`: an explanation. None if nothing was looked up."""
    ended = found["reuse_ended"]
    if ended is None:
        return None
    return _SENTENCES.get(ended["reason"], _unknown)(found, ended)


def remedy(ended: Facts) -> str | None:
    """What the client can do. `ended`: where and why reuse ended. None if there is nothing to do, or nothing is
    known."""
    reason, kind = ended["reason"], ended.get("kind")
    if reason == Cause.CHANGING_LINE:
        if kind == Kind.CLIENT_STAMP:
            return "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 where Claude Code runs"
        if ended["part"]["name"] == "template":
            return "give the chat template a fixed value in chat_template_kwargs, if it takes one"
        return "leave the line out, or move it to the end of the conversation"
    if reason == Cause.REWRITTEN and kind == Kind.NOT_SENT_BACK:
        return "send the reasoning back with its turn (reasoning_content, thinking blocks)"
    return {
        Cause.SAME_TEXT: f"{CONTINUE}; or send the token ids (return_token_ids, prompts of ids)",
        Cause.REWRITTEN: CONTINUE,
        Cause.SYSTEM: "keep the system message as it is, and put what changes into the last message",
        Cause.TOOLS: "send the same tools in the same order with each request",
    }.get(reason)


def summary(found: Facts) -> str:
    """One sentence or two."""
    ended = found["reuse_ended"]
    if ended is None:
        return f"{'cancelled' if found['cancelled'] else 'ended'} while queued: nothing was looked up or computed"
    prompt, reused, computed = (found[f"{name}_tokens"] for name in ("prompt", "reused", "recomputed"))
    text = f"reused {reused} of {counted(prompt, 'prompt token')}{restored(found)}, computed {computed} in "
    text += f"{found['recompute_ms']:.0f} ms: {because(found)}{_quoted_difference(ended)}"
    if found["preemptions"]:
        again = found["recomputed_after_preemption"]
        text += f"; preempted {counted(found['preemptions'], 'time')}, which computed "
        text += f"{counted(again['tokens'], 'token')} in {again['ms']:.0f} ms again"
    if found["cancelled"]:
        text += f"; cancelled {cancelled_at(found)}"
    return text


def restored(found: Facts) -> str:
    """Which of the reused tokens came from tiers and snapshots: ` (14,900 from snapshot x.kvs, read in 0.11 s)`."""
    sources = [(tier["tokens"], name, tier["ms"]) for name, tier in found.get("fetched", {}).items()]
    if "snapshot" in found:
        source = found["snapshot"]
        sources.append((source["tokens"], f"snapshot {source['name']}", source["read_ms"]))
    words = [f"{n:,} from {name}, read in {ms / 1000:.2f} s" for n, name, ms in sources if n]
    return f" ({'; '.join(words)})" if words else ""


def cancelled_at(found: Facts) -> str:
    if found["reuse_ended"] is None:
        return "while queued"
    missing = found["prompt_tokens"] - found["reused_tokens"] - found["recomputed_tokens"]
    return f"with {counted(missing, 'prompt token')} to go" if missing else "during its answer"


def place(part: Facts) -> str:
    """The part of a chat in which reuse ended."""
    if part["name"] == "turn":
        return f"turn {part['turn']} ({part['role']})"
    return {"system": "the system message", "tools": "the tools"}.get(part["name"], "the text of the chat template")


def _unknown(found: Facts, ended: Facts) -> str:
    """A newer server has reasons that we do not know."""
    return f"{ended['reason']} at token {ended['at']}"


def _differs(found: Facts, ended: Facts) -> str:
    where = f", in {place(ended['part'])}" if "part" in ended else ""
    again = ended["at"] - found["reused_tokens"]
    tile = f"; the last {again} of them are computed again, {_BY_TILES}" if again else ""
    return f"differs at token {ended['at']} from the nearest earlier text{where}{tile}"


def _end(found: Facts, ended: Facts) -> str:
    if found["prompt_tokens"] > 1:
        return "everything was in the cache; the last token is always computed, for its logits"
    return "a single token is always computed, for its logits"


def _lost(words: str) -> Callable[[Facts, Facts], str]:
    def sentence(found: Facts, ended: Facts) -> str:
        at = ended["at"]
        known = counted(at, "token") + (" was" if at == 1 else " were")
        when = "" if ended.get("when") is None else strftime(" at %H:%M:%S", localtime(ended["when"]))
        return words.format(known=known, lost=at - found["reused_tokens"], when=when)

    return sentence


def _same_text(found: Facts, ended: Facts) -> str:
    tokens = ended.get("tokens", {})
    both = f": {tokens['theirs']} then, {tokens['ours']} now" if "theirs" in tokens else ""
    where = f" (character {ended['character']})" if "character" in ended else ""
    return f"the same text goes on in other tokens at token {ended['at']}{where}{both}"


def _rewritten(found: Facts, ended: Facts) -> str:
    where, kind = place(ended["part"]), ended["kind"]
    if kind == Kind.NOT_SENT_BACK:
        return f"{where} came back without its reasoning, from token {ended['at']} on"
    if kind == Kind.DROPPED:
        return f"the chat template dropped the reasoning of {where}, from token {ended['at']} on"
    return f"the chat template rewrote {where}, which the client sent back unchanged, from token {ended['at']} on"


def _changing_line(found: Facts, ended: Facts) -> str:
    looks = LOOKS_LIKE.get(ended["kind"], ended["kind"])
    return f"a line of {place(ended['part'])} changes between requests, at token {ended['at']}: it has {looks}"


_BY_TILES = "because cells of this type are reused 32 tokens at a time"
_Sentence = Callable[[Facts, Facts], str]
_SENTENCES: dict[str, _Sentence] = {
    Reason.END: _end,
    Reason.NEW: lambda _, ended: f"the earlier text ends at token {ended['at']}, what follows is new",
    Reason.NOTHING_SHARED: lambda *_: "no earlier text begins like this one",
    Reason.DIFFERS: _differs,
    Reason.EVICTED: _lost("{known} known, {lost} of them evicted{when} to make room"),
    Reason.OUT_OF_WINDOW: _lost("{known} known, but {lost} of them had left the window{when}"),
    Reason.TILE: _lost(f"{{known}} shared, the last {{lost}} of them are computed again, {_BY_TILES}"),
    Reason.SHORT: _lost("{known} shared, {lost} of them in a block that was never filled and not kept"),
    Reason.NOT_SHARING: lambda *_: "this cache strategy does not share prefixes; paged does",
    Reason.LOGITS: lambda *_: "log-probabilities of the prompt were asked for, which need the logits of every token",
    Reason.STATES: lambda *_: "the mean of the prompt's states was asked for, which needs the state of every token",
    Reason.NOT_WORTH_IT: _lost("{known} stored, {lost} of them left there because computing is faster than reading"),
    Reason.TOO_SLOW: _lost("{known} stored, but reading {lost} of them took as long as computing them"),
    Reason.DAMAGED: _lost("{known} stored, but {lost} of them were lost with a damaged file, which was removed"),
    Cause.SAME_TEXT: _same_text,
    Cause.REWRITTEN: _rewritten,
    Cause.CHANGING_LINE: _changing_line,
    Cause.SYSTEM: lambda _, ended: f"the system message changed at token {ended['at']}",
    Cause.TOOLS: lambda _, ended: f"the tools changed at token {ended['at']}",
}


def _quoted_difference(ended: Facts) -> str:
    """Both texts around the place where they differ, if the caller may see the earlier one."""
    if "theirs" not in ended:
        return ""
    theirs, ours = (f"{_quote(ended[which]['onward'])} (token {ended[which]['token']})" for which in ("theirs", "ours"))
    return f": after {_quote(ended['before'])} it continued {theirs}, now {ours}"


def _quote(text: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{shown}"'
