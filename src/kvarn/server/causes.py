"""Why a prompt differs from the nearest earlier text: the part of the chat, and the cause where it can be told.

Called after the fact, for prompts whose reuse ended with `differs`, and never on the engine's thread. Nothing that was
remembered changes an answer: it only explains.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from kvarn.cache.adoption import Reason
from kvarn.chats.chats import Chats
from kvarn.chats.parts import Part, Parts, parts_of
from kvarn.engine.difference import Cause, Difference, Kind, same_text
from kvarn.engine.explain import AHEAD, Explanation
from kvarn.server.changing import kind_of, line_at
from kvarn.server.talk import Talk
from kvarn.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt to explain.

    same_turns  how many turns from the first an earlier request of the same key has, too: the answer to it counts as
                its last turn
    same_tools  whether that request had the same tools
    quotes      whether the earlier text may be looked at for more than its tokens
    """

    tokens: Sequence[int]
    talk: Talk | None
    same_turns: int = 0
    same_tools: bool = True
    quotes: bool = True


class Causes:
    """`chats`: those of the model. `variables`: of the template, for a chat."""

    def __init__(
        self, tokenizer: Tokenizer, chats: Callable[[], Chats], variables: Callable[[Talk], Mapping[str, Any]]
    ) -> None:
        self._tokenizer = tokenizer
        self._chats = chats
        self._variables = variables

    def find(self, e: Explanation, asked: Asked) -> Explanation:
        """The explanation with its difference."""
        if not differs(e):
            return e
        assert e.limit is not None
        spell = self._tokenizer.pieces(special=True)
        before = b"".join(map(spell.push, asked.tokens[: e.limit.at]))
        spell_theirs = copy(spell)  # what a token spells depends on those before it
        theirs = [(token, spell_theirs.push(token)) for token in e.limit.onward]
        ours = [(token, spell.push(token)) for token in asked.tokens[e.limit.at :]]
        tokens = same_text(ours[:AHEAD], theirs)
        found = Difference(Cause.SAME_TEXT, tokens=tokens) if tokens is not None else Difference()
        try:
            text = (before + b"".join(raw for _, raw in ours)).decode()
        except UnicodeDecodeError:  # ids of a text completion: they need not be text
            return replace(e, difference=found)
        at = len(before.decode("utf-8", "ignore"))  # a token may begin with half a character
        parts = None if asked.talk is None else self._parts(asked.talk, text)
        if parts is None or asked.talk is None:
            found = replace(found, character=at)
        else:
            at = parts.place(text, at)
            if tokens is not None:
                found = _in_part(replace(found, character=at), parts.at(at))
            else:
                onward = b"".join(raw for _, raw in theirs).decode("utf-8", "replace")
                found = self._of_chat(at, onward, parts, asked, asked.talk)
        return replace(e, difference=found)

    def _parts(self, talk: Talk, text: str) -> Parts | None:
        return parts_of(self._chats(), talk.messages, talk.tools, self._variables(talk), text, talk.continues)

    def _of_chat(self, at: int, onward: str, parts: Parts, asked: Asked, talk: Talk) -> Difference:
        """`at`: where the tokens part. `onward`: the earlier text from there."""
        # How far a token agrees would tell characters of a text that the caller must not see.
        common = _common(parts.text[at : at + len(onward)], onward) if asked.quotes else 0
        rest = onward[common:]
        at += common
        part = parts.at(at)
        found = _in_part(Difference(character=at), part)
        if part.name == "turn" and part.role == "assistant":
            return self._of_answer(found, rest, parts, asked, talk.messages[part.turn])
        if part.name in ("system", "template") or (part == Part("turn", 0, part.role) and len(talk.messages) > 1):
            ours = line_at(parts.text, at, *parts.between(at))
            theirs = (ours[0][: ours[1]] + rest.partition("\n")[0], ours[1])
            if kind := kind_of(ours, theirs if asked.quotes else None):
                return replace(found, cause=Cause.CHANGING_LINE, kind=kind, line=ours[0])
        if part.name == "tools" or (part.name == "system" and asked.same_turns and not asked.same_tools):
            return replace(found, cause=Cause.TOOLS, part="tools")
        if part.name == "turn" and part.turn < asked.same_turns:
            return replace(found, cause=Cause.REWRITTEN, kind=Kind.OTHERWISE)
        return replace(found, cause=Cause.SYSTEM if part.name == "system" else None)

    def _of_answer(
        self, found: Difference, rest: str, parts: Parts, asked: Asked, message: Mapping[str, Any]
    ) -> Difference:
        """Of a difference in a turn of the assistant. `rest`: the earlier text from there."""
        at = found.character or 0
        reasoning = self._chats().dialect.reasoning
        begin, end = (marker.strip() for marker in reasoning) if reasoning else ("", "")
        theirs = _reasoning(parts.text[:at] + rest, at, begin, end) if begin else None
        if theirs is not None and not (_reasoning(parts.text, at, begin, end) or "").strip():
            if not theirs.strip():
                return replace(found, cause=Cause.REWRITTEN, kind=Kind.OTHERWISE)
            sent = bool(message.get("reasoning_content")) or begin in str(message.get("content"))
            return replace(found, cause=Cause.REWRITTEN, kind=Kind.DROPPED if sent else Kind.NOT_SENT_BACK)
        if found.turn < asked.same_turns:
            return replace(found, cause=Cause.REWRITTEN, kind=Kind.OTHERWISE)
        return found


def differs(e: Explanation) -> bool:
    return e.limit is not None and e.limit.reason is Reason.DIFFERS and e.limit.theirs is not None


def _common(a: str, b: str) -> int:
    """Characters of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _in_part(found: Difference, part: Part) -> Difference:
    return replace(found, part=part.name, turn=part.turn, role=part.role)


def _reasoning(text: str, at: int, begin: str, end: str) -> str | None:
    """The reasoning of the text around this place, or right after it. None if there is none."""
    blank = len(text[at:]) - len(text[at:].lstrip())
    opened = text.rfind(begin, 0, at + blank + len(begin))
    if opened < 0:
        return None
    inside, closed, _ = text[opened + len(begin) :].partition(end)
    return None if closed and opened + len(begin) + len(inside) < at else inside
