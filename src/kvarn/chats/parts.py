"""Which part of a rendered conversation is whose: the system message, the tools, or a turn.

Only the template knows where it writes what. So the conversation is rendered a second time with marks around its
texts, which are characters that nobody uses. Without the marks the text must be the prompt itself; otherwise the
template looks into the texts, and nothing is known. It costs a rendering, so it is done only when somebody asks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvarn.chats.chats import Chats
from kvarn.chats.tools import ToolUse
from kvarn.errors import KvarnError
from kvarn.text.quoting import restored, texts_of, unused

Message = Mapping[str, Any]
DIGITS = 64  # a mark has two digits: DIGITS ** 2 parts can be told apart
MOST_BEFORE = 32  # characters that encoding may add before a text: a token that begins it, or a space
TOOLS = DIGITS**2 - 1  # the number of the part of all tools; the others are those of messages


class Part(NamedTuple):
    name: str  # system, tools, turn, or template: what the template adds at the end
    turn: int = 0  # of a turn: index in the messages
    role: str = ""


class Mark(NamedTuple):
    at: int  # characters of the prompt before it
    part: int


class Parts:
    """`text`: the prompt."""

    def __init__(self, text: str, marks: Sequence[Mark], messages: Sequence[Message]) -> None:
        self.text = text
        self._marks = marks
        self._messages = messages

    def place(self, spelled: str, at: int) -> int:
        """Where in the text a place of what its tokens spell is."""
        if spelled.endswith(self.text):
            return max(at - (len(spelled) - len(self.text)), 0)
        rest, place = len(_dense(spelled[at:])), len(self.text)
        while rest and place:
            place -= 1
            rest -= not self.text[place].isspace()
        return place

    def at(self, character: int) -> Part:
        """The part that this character belongs to. What the template writes before the texts of a turn is part of the
        turn, and what it writes after calls and tools is part of them."""
        place = bisect_left(self._marks, character, key=lambda mark: mark.at)
        before = self._marks[place - 1].part if place else None
        after = self._marks[place].part if place < len(self._marks) else None
        exact = after is not None and self._marks[place].at == character
        if before is not None and not exact and before != after and self._goes_on(before):
            return self._part(before)
        return Part("template") if after is None else self._part(after)

    def between(self, character: int) -> tuple[int, int]:
        """The characters from the mark before this one to the next mark."""
        place = bisect_left(self._marks, character, key=lambda mark: mark.at)
        exact = place < len(self._marks) and self._marks[place].at == character
        begin = character if exact else self._marks[place - 1].at if place else 0
        after = next((mark.at for mark in self._marks[place:] if mark.at > character), len(self.text))
        return begin, after

    def inside(self, character: int) -> bool:
        """Whether it is in a text that has marks, and not in what the template writes around it."""
        return bool(bisect_right(self._marks, character, key=lambda mark: mark.at) % 2)

    def _goes_on(self, part: int) -> bool:
        return part == TOOLS or bool(self._messages[part].get("tool_calls"))

    def _part(self, number: int) -> Part:
        if number == TOOLS:
            return Part("tools")
        role = str(self._messages[number]["role"])
        head = all(message["role"] == "system" for message in self._messages[: number + 1])
        return Part("system") if head else Part("turn", number, role)


def parts_of(
    chats: Chats,
    messages: Sequence[Message],
    use: ToolUse,
    variables: Mapping[str, Any],
    prompt: str,
    continues: bool = False,
) -> Parts | None:
    """Of a conversation whose tokens spell `prompt`. Some tokenizers drop white space. None: not known."""
    if len(messages) >= TOOLS:
        return None
    characters = unused((prompt, *texts_of([messages, list(use.shown)])))
    alphabet = [c for c, _ in zip(characters, range(DIGITS + 1), strict=False)]
    if len(alphabet) <= DIGITS:
        return None
    for deep in (True, False):  # a template may look into calls and tools, but seldom into texts
        marked = [_message(message, _mark(i, alphabet), deep) for i, message in enumerate(messages)]
        tools = replace(use, shown=tuple(_tool(tool, _mark(TOOLS, alphabet), deep) for tool in use.shown))
        try:
            text, stand_ins = chats.prompt(marked, tools, variables, continues=continues)
        except KvarnError:
            continue
        plain, marks = _without_marks(restored(text, stand_ins), alphabet)
        if plain and any(_ends(form(prompt), form(plain)) for form in (str, _dense)):
            return Parts(plain, marks, messages)
    return None


def _ends(prompt: str, plain: str) -> bool:
    return prompt.endswith(plain) and len(prompt) - len(plain) <= MOST_BEFORE


def _dense(text: str) -> str:
    return "".join(text.split())


def _mark(part: int, alphabet: Sequence[str]) -> str:
    return alphabet[DIGITS] + alphabet[part // DIGITS] + alphabet[part % DIGITS]


def _message(message: Message, mark: str, deep: bool) -> dict[str, Any]:
    new = dict(message)
    for key in ("content", "reasoning_content"):
        if isinstance(new.get(key), str):
            new[key] = _around(new[key], mark)
    if deep and new.get("tool_calls"):
        new["tool_calls"] = [_call(call, mark) for call in new["tool_calls"]]
    return new


def _call(call: Message, mark: str) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "name": _around(function["name"], mark)}}


def _tool(tool: Message, mark: str, deep: bool) -> dict[str, Any]:
    function = dict(tool["function"])
    if isinstance(function.get("description"), str):
        function["description"] = _around(function["description"], mark)
    if deep:
        function["name"] = _around(function["name"], mark)
    return {**tool, "function": function}


def _around(text: str, mark: str) -> str:
    """White space stays outside: templates cut it off."""
    core = text.strip()
    if not core:
        return text
    at = text.index(core)
    return f"{text[:at]}{mark}{core}{mark}{text[at + len(core) :]}"


def _without_marks(text: str, alphabet: Sequence[str]) -> tuple[str, list[Mark]]:
    value = {character: i for i, character in enumerate(alphabet[:DIGITS])}
    first, *rest = text.split(alphabet[DIGITS])
    plain, marks, at = [first], [], len(first)
    for piece in rest:
        high, low = value.get(piece[:1]), value.get(piece[1:2])
        if high is None or low is None:  # cut by the template
            return "", []
        marks.append(Mark(at, high * DIGITS + low))
        plain.append(piece[2:])
        at += len(piece) - 2
    return "".join(plain), marks
