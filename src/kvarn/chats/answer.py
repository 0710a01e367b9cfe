"""An answer in its parts: reasoning, text and tool calls, read from what the model writes.

The text may come in any pieces. Non-goals: finding the parts in it (kvarn.dialect); formats of protocols.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Delta, Malformed, Reasoning, joined


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for.

    id          of the call; the message with its result has it as `tool_call_id`
    name        of the function
    arguments   JSON text of an object
    """

    id: str
    name: str
    arguments: str

    def as_field(self) -> dict[str, Any]:
        """As messages have it, in OpenAI's API and in chat templates."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Parts(Protocol):
    """kvarn.dialect's Parser, or `Plain`."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class Plain:
    """All text is content."""

    def push(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@dataclass(slots=True)
class Reader:
    """Reads one answer. What it has read so far is in its fields.

    reasoning_end   the marker after the reasoning; empty if there is none
    hidden          names of control tokens, which are never content
    error           why a call that the model wrote is no call; its text is then content
    ids             of the calls, by their numbers; a second reader of the same answer can be given those of the first
    """

    parts: Parts = field(default_factory=Plain)
    reasoning_end: str = ""
    hidden: tuple[str, ...] = ()
    error: str | None = None
    ids: dict[int, str] = field(default_factory=dict)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, tuple[CallBegin, list[str]]] = field(default_factory=dict)  # with the parts of their arguments
    _ended: list[int] = field(default_factory=list)  # the calls that are complete
    _tail: str = ""  # of the text so far: what may begin the end marker
    _before: int = 0  # how long the text before it is
    _reasoned: int | None = None  # how long the text was when the reasoning ended

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """Those that are complete."""
        made = (self._calls[index] for index in self._ended)
        return [ToolCall(call.id, call.name, "".join(parts)) for call, parts in made]

    def push(self, text: str) -> list[Delta]:
        if self.reasoning_end and self._reasoned is None:
            self._look_for_end(text)
        return self._take(self.parts.push(text))

    def finish(self) -> list[Delta]:
        return self._take(self.parts.finish())

    def finish_reason(self, reason: str) -> str:
        """That of the answer, if the model ended for `reason`."""
        return "tool_calls" if reason == "stop" and self._ended else reason

    def n_reasoning(self, ends: Sequence[int]) -> int:
        """How many tokens the reasoning has. `ends`: how long the text was after each token."""
        if not self._reasoning:
            return 0
        return len(ends) if self._reasoned is None else bisect_right(ends, self._reasoned)

    @property
    def begun(self) -> bool:
        """Whether it is known what the answer begins with."""
        return bool(self._reasoning or self._content or self._calls)

    def _look_for_end(self, text: str) -> None:
        seen, n = self._tail + text, len(self.reasoning_end)
        if (at := seen.find(self.reasoning_end)) >= 0:
            self._reasoned = self._before + at + n
        self._tail = seen[max(len(seen) - n + 1, 0) :]
        self._before += len(seen) - len(self._tail)

    def _take(self, given: list[Delta]) -> list[Delta]:
        deltas = [self._known(delta) for delta in joined(given)]
        for delta in deltas:
            match delta:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin(index):
                    self._calls[index] = delta, []
                case CallArguments(index, text):
                    self._calls[index][1].append(text)
                case Malformed(text, error):
                    self._content.append(text)
                    self.error = self.error or error
                case CallEnd(index, complete):
                    if complete:
                        self._ended.append(index)
        return deltas

    def _known(self, delta: Delta) -> Delta:
        """With the id that the call has, or without control tokens."""
        if isinstance(delta, CallBegin):
            return replace(delta, id=self.ids.setdefault(delta.index, delta.id))
        if isinstance(delta, Content | Malformed):
            for name in self.hidden:
                if name in delta.text:
                    delta = replace(delta, text=delta.text.replace(name, ""))
        return delta


def content_of(delta: Delta) -> str:
    """The text that it adds to the content."""
    return delta.text if isinstance(delta, Content | Malformed) else ""
