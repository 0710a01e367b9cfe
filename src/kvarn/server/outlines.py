"""What is remembered of a chat to compare a later one with it: hashes of its parts, and no text.

A turn's hash covers all turns before it, so two chats have the same first n turns if their n-th hashes are equal.
Reasoning is not covered: clients and templates drop it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kvarn.chats.answer import Reader
from kvarn.server.talk import Talk

SIZE = 8  # bytes of a hash
MOST = 1024  # turns of a chat that are remembered
Message = Mapping[str, Any]


class Outline(NamedTuple):
    tools: bytes
    settings: bytes  # of the template: effort and variables
    n_system: int  # system messages at the beginning
    turns: bytes  # the hashes of the turns; after the answer its own is the last
    n_tokens: int = 0  # of the prompt, and of its answer

    def answered(self, answer: Reader) -> "Outline":
        """With the answer as the last turn."""
        message = {"role": "assistant", "content": answer.content}
        calls = [call.as_field() for call in answer.calls]
        turns = self.turns + _turn(self.turns[-SIZE:], message | ({"tool_calls": calls} if calls else {}))
        return self._replace(turns=turns[: MOST * SIZE])

    def same_turns(self, other: "Outline") -> int:
        """How many turns from the first are the same."""
        low, high = 0, min(len(self.turns), len(other.turns)) // SIZE
        while low < high:  # the first n are the same if the n-th hashes are
            middle = (low + high + 1) // 2
            at = slice((middle - 1) * SIZE, middle * SIZE)
            low, high = (middle, high) if self.turns[at] == other.turns[at] else (low, middle - 1)
        return low


def outline_of(talk: Talk) -> Outline:
    last, turns = b"", []
    for message in talk.messages[:MOST]:
        last = _turn(last, message)
        turns.append(last)
    roles = [message["role"] for message in talk.messages]
    n_system = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    settings = _hash([talk.effort, talk.variables])
    return Outline(_hash([*talk.tools.shown]), settings, n_system, b"".join(turns))


def _turn(before: bytes, message: Message) -> bytes:
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    text = (message.get("content") or "").strip()
    return _hash([before.hex(), message["role"], text, calls, message.get("tool_call_id")])


def _call(function: Message) -> Sequence[Any]:
    """Clients may write the JSON of arguments anew."""
    given = function.get("arguments") or "{}"
    try:
        return function["name"], json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return function["name"], given


def _hash(value: Any) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True)
    except (RecursionError, ValueError):
        return os.urandom(SIZE)  # nested too deeply: like no other
    return blake2b(text.encode(), digest_size=SIZE).digest()
