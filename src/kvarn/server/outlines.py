"""What is remembered of a chat to compare a later one with it: hashes of its parts, and no text.

A turn's hash covers all turns before it, so two chats have the same first n turns if their n-th hashes are equal.
Reasoning is not covered: clients and templates drop it. Of lines that have a time, a date, a number or an id, there is
a hash of the line with it and one without it: two such lines are told from two that have nothing in common.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from kvarn.chats.answer import Reader
from kvarn.server.changing import masked
from kvarn.server.talk import Talk

SIZE = 8  # bytes of a hash
MOST = 1024  # turns of a chat that are remembered
MOST_STAMPS = 64  # lines
MOST_READ = 1 << 15  # characters of a message whose lines are remembered
Message = Mapping[str, Any]


class Outline(NamedTuple):
    tools: bytes
    settings: bytes  # of the template: effort and variables
    n_system: int  # system messages at the beginning
    turns: bytes  # the hashes of the turns; after the answer its own is the last
    stamps: bytes = b""  # of lines before the first answer, two hashes each: without its stamps, and whole
    opening: bytes = b""  # of the first turn of the assistant alone; empty: there is none
    salt: bytes = b""
    n_tokens: int = 0  # of the prompt, and of its answer

    def answered(self, answer: Reader) -> "Outline":
        """With the answer as the last turn."""
        calls = [call.as_field() for call in answer.calls]
        message = {"role": "assistant", "content": answer.content, "tool_calls": calls}
        turns = self.turns + _turn(self.turns[-SIZE:], message)
        return self._replace(turns=turns[: MOST * SIZE], opening=self.opening or _turn(b"", message))

    def same_turns(self, other: "Outline") -> int:
        """How many turns from the first are the same."""
        low, high = 0, min(len(self.turns), len(other.turns)) // SIZE
        while low < high:  # the first n are the same if the n-th hashes are
            middle = (low + high + 1) // 2
            at = slice((middle - 1) * SIZE, middle * SIZE)
            low, high = (middle, high) if self.turns[at] == other.turns[at] else (low, middle - 1)
        return low


class Earlier(NamedTuple):
    """A chat, and the earlier ones of the same key and salt, the newest first."""

    chat: Outline = Outline(b"", b"", 0, b"")
    others: Sequence[Outline] = ()

    def other_tools(self) -> bool:
        """Whether the tools changed: the chat that begins most alike has others."""
        nearest = max(self.others, key=self.chat.same_turns, default=self.chat)
        return nearest.tools != self.chat.tools and self.chat.same_turns(nearest) > 0

    def unchanged(self, turn: int, at: int) -> bool:
        """Whether a chat had this turn and all before it, and is longer than `at` tokens: its text would be the same up
        to there, if the template wrote it as before."""
        alike = (each for each in self.others if (each.tools, each.settings) == (self.chat.tools, self.chat.settings))
        return any(at < each.n_tokens - 1 and turn < self.chat.same_turns(each) for each in alike)

    def restamped(self, line: str, opened: bool) -> bool:
        """Whether a chat had this line with another time, date, number or id. `opened`: and the same first answer, so
        that it is the same conversation."""
        stamp = _stamp(line)
        if stamp is None or (opened and not self.chat.opening):
            return False
        alike = (each for each in self.others if not opened or each.opening == self.chat.opening)
        near = (each.stamps for each in alike if stamp[:SIZE] in each.stamps)  # few, so the rest may be slow
        pairs = (stamps[i : i + 2 * SIZE] for stamps in near for i in range(0, len(stamps), 2 * SIZE))
        return any(each != stamp and each.startswith(stamp[:SIZE]) for each in pairs)


NO_CHATS = Earlier()


def outline_of(talk: Talk, salt: bytes = b"") -> Outline:
    messages = talk.messages
    last, turns = b"", []
    for message in messages[:MOST]:
        last = _turn(last, message)
        turns.append(last)
    n_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    settings = _hash([talk.effort, talk.variables])
    stamps = b"".join(islice((stamp for each in messages[: n_system + 1] for stamp in _stamps(each)), MOST_STAMPS))
    opening = next((_turn(b"", message) for message in messages if message["role"] == "assistant"), b"")
    return Outline(_hash([*talk.tools.shown]), settings, n_system, b"".join(turns), stamps, opening, salt)


def _turn(before: bytes, message: Message) -> bytes:
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    text = message.get("content") or ""
    text = text.strip() if calls else text  # protocols leave out white space around calls
    return _hash([before.hex(), message["role"], text, calls, message.get("tool_call_id")])


def _stamps(message: Message) -> Iterator[bytes]:
    text = (message.get("content") or "")[:MOST_READ]
    return (stamp for line in text.split("\n") if (stamp := _stamp(line)) is not None)


def _stamp(line: str) -> bytes | None:
    bare = masked(line.strip())
    return None if bare is None else _hash(bare) + _hash(line.strip())


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
