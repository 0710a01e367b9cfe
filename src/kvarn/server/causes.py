"""Why a prompt differs from the nearest earlier text: the part of the chat, and the cause where it can be told.

Called after the fact, for prompts whose reuse ended with `differs`, and never on the engine's thread. Nothing that was
remembered changes an answer: it only explains.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvarn.cache.adoption import Reason
from kvarn.chats.chats import Chats
from kvarn.chats.parts import Part, Parts, parts_of
from kvarn.engine.difference import Cause, Difference, Kind, same_text
from kvarn.engine.explain import AHEAD, Explanation
from kvarn.server.changing import MOST_LINE, kind_of, line_at
from kvarn.server.outlines import NO_CHATS, Earlier
from kvarn.server.talk import Talk
from kvarn.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt to explain.

    earlier     what is remembered of chats
    quotes      whether the earlier text may be looked at for more than its tokens
    """

    tokens: Sequence[int]
    talk: Talk | None
    earlier: Earlier = NO_CHATS
    quotes: bool = True


class _Place(NamedTuple):
    """Where the tokens part."""

    token: int
    character: int  # of our text
    first: int  # characters of our first token from there
    onward: str  # the earlier text from there


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
                first = len(ours[0][1].decode("utf-8", "ignore"))
                found = self._of_chat(_Place(e.limit.at, at, first, onward), parts, asked, asked.talk)
        return replace(e, difference=found)

    def _parts(self, talk: Talk, text: str) -> Parts | None:
        return parts_of(self._chats(), talk.messages, talk.tools, self._variables(talk), text, talk.continues)

    def _of_chat(self, place: _Place, parts: Parts, asked: Asked, talk: Talk) -> Difference:
        # How far a token agrees would tell characters of a text that the caller must not see.
        here = parts.text[place.character : place.character + len(place.onward)]
        common = _common(here, place.onward) if asked.quotes else 0
        at, reach = place.character + common, 0 if asked.quotes else place.first
        part = parts.at(at)
        found = _in_part(Difference(character=at), part)
        earlier = asked.earlier
        if part.name == "turn" and part.role == "assistant":
            unchanged = earlier.unchanged(part.turn, place.token)
            return self._of_answer(found, place.onward[common:], parts, unchanged, talk.messages[part.turn])
        if part.name != "tools" and part.turn == 0 and (line := _changing(at, reach, parts, earlier)):
            return replace(found, **line)
        if part.name == "tools" or (part.name == "system" and earlier.other_tools()):
            return replace(found, cause=Cause.TOOLS, part="tools")
        if part.name == "turn" and earlier.unchanged(part.turn, place.token):
            return replace(found, cause=Cause.REWRITTEN, kind=Kind.OTHERWISE)
        return replace(found, cause=Cause.SYSTEM if part.name == "system" else None)

    def _of_answer(
        self, found: Difference, rest: str, parts: Parts, unchanged: bool, message: Mapping[str, Any]
    ) -> Difference:
        """Of a difference in a turn of the assistant. `rest`: the earlier text from there. `unchanged`: the client sent
        the turn back as it was."""
        at = found.character or 0
        reasoning = self._chats().dialect.reasoning
        begin, end = (marker.strip() for marker in reasoning) if reasoning else ("", "")
        theirs = _reasoning(parts.text[:at] + rest, at, begin, end) if begin else None
        if theirs is not None and theirs.strip() and not (_reasoning(parts.text, at, begin, end) or "").strip():
            if message.get("reasoning_content") or begin in str(message.get("content")):
                return replace(found, cause=Cause.REWRITTEN, kind=Kind.DROPPED)
            return replace(found, cause=Cause.REWRITTEN, kind=Kind.NOT_SENT_BACK) if unchanged else found
        return replace(found, cause=Cause.REWRITTEN, kind=Kind.OTHERWISE) if unchanged else found


def differs(e: Explanation) -> bool:
    return e.limit is not None and e.limit.reason is Reason.DIFFERS and e.limit.theirs is not None


def _changing(at: int, reach: int, parts: Parts, earlier: Earlier) -> dict[str, Any] | None:
    """The facts of a line that changes with each request, if the character is in one. The difference is at most
    `reach` characters after it."""
    # A line of ours may end where that of the earlier text goes on.
    own = next((place for place in (at, at + reach, at - 1) if parts.inside(place)), None)
    around = parts.between(at if own is None else own)
    line, place = line_at(parts.text, at, *around)
    kind = kind_of(line, place, place + reach)
    found = {"cause": Cause.CHANGING_LINE, "kind": kind, "line": line}
    if own is None:  # the words of a template are always the same, but it may write a date
        return found | {"part": "template"} if kind in (Kind.CLOCK, Kind.DATE) else None
    whole, _ = line_at(parts.text, at, *around, most=2 * MOST_LINE)
    restamped = kind is not None and earlier.restamped(whole, opened=parts.at(own).name == "turn")
    return found if kind is Kind.CLIENT_STAMP or restamped else None


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
