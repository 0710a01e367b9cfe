"""An answer in its parts: reasoning, text and tool calls, read from what the model writes.

The text may come in any pieces. Non-goals: finding the parts in it (kvarn.dialect); formats of protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Delta, Malformed, Reasoning


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments`: JSON text of an object."""

    id: str
    name: str
    arguments: str


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

    error   why a call that the model wrote is no call; its text is then content
    """

    parts: Parts
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None

    def push(self, text: str) -> list[Delta]:
        return self._take(self.parts.push(text))

    def finish(self) -> list[Delta]:
        return self._take(self.parts.finish())

    def finish_reason(self, reason: str | None) -> str | None:
        """That of the answer, if the model stopped for `reason`."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _take(self, deltas: Sequence[Delta]) -> list[Delta]:
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, id, name):
                    self.calls.append(ToolCall(id, name, ""))
                case CallArguments(index, text):
                    call = self.calls[index]
                    self.calls[index] = ToolCall(call.id, call.name, call.arguments + text)
                case Malformed(text, error):
                    self.content += text
                    self.error = self.error or error
                case CallEnd():
                    pass
        return list(deltas)
