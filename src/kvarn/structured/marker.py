"""A structure that begins after a text, as after a model's reasoning.

    [white space] [begin] any text [marker] [white space] structure

Contract: as state.py: functions of the answer's tokens. Without a text that begins the free part, the answer
is free from its start. With one, the answer is either free from there, or the structure at once; as long as
its tokens can be both, both are allowed to go on. Non-goal: which texts a model uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Doubles
from kvarn.errors import KvarnError
from kvarn.structured.state import Guided
from kvarn.text.tokenizer import Tokenizer

_GAP = 8  # bytes of white space that may come before the structure
_SPACE = b" \n\r\t"
Ids = NDArray[np.intp]


@dataclass(frozen=True)
class Marker:
    """The texts, and the tokens that matter for them. Control tokens have the bytes of their name."""

    text: bytes
    begin: bytes  # empty: the answer is free from its start
    token_bytes: Sequence[bytes]  # by id
    eos_ids: Ids
    spaces: Ids  # tokens of white space
    n_bytes: Ids  # of `spaces`
    overruns: list[Ids]  # by bytes of the marker that the answer has: tokens with the rest, and more than white space
    openers: list[Ids]  # by bytes of `begin` that the answer has: tokens that go on with it

    @staticmethod
    def of(tokenizer: Tokenizer, text: str, eos_ids: tuple[int, ...], begin: str | None = None) -> "Marker":
        marker, opening = text.encode(), (begin or "").encode()
        if not marker or begin == "":
            raise KvarnError("the text before or after which a structure begins is empty: give None")
        tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        spaces = [id for id, token in enumerate(tokens) if token and not token.strip(_SPACE)]
        longer = [id for id, token in enumerate(tokens) if token.partition(marker[-1:])[2].strip(_SPACE)]

        def overrun(n: int, id: int) -> bool:
            return bool((marker[:n] + tokens[id]).partition(marker)[2].strip(_SPACE))

        def opens(n: int, id: int) -> bool:
            joined = opening[:n] + tokens[id] if n else tokens[id].lstrip(_SPACE)
            return len(joined) > n and (opening.startswith(joined) or joined.startswith(opening))

        banned = [[id for id in longer if overrun(n, id)] for n in range(len(marker))]
        openers = [[id for id in range(len(tokens)) if opens(n, id)] for n in range(len(opening))]
        return Marker(
            marker,
            opening,
            tokens,
            np.array(eos_ids, np.intp),
            np.array(spaces, np.intp),
            np.array([len(tokens[id]) for id in spaces], np.intp),
            [np.array(ids, np.intp) for ids in banned],
            [np.setdiff1d(np.array(ids, np.intp), banned[0]) for ids in openers],
        )

    def begun(self, text: bytes) -> int:
        """How many bytes at the end of the text begin the marker."""
        longest = min(len(self.text) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self.text[:n])), 0)


@dataclass
class Following:
    guided: Guided
    marker: Marker
    _seen: list[int] = field(default_factory=list)
    _head: bytes | None = None  # what the answer has of `begin`; None: it is decided
    _free: bool = True  # the marker has not come
    _begun: int = 0  # bytes of the marker at the end of what was seen
    _gap: int = 0  # bytes of white space before the structure
    _start: int | None = None  # where the structure begins in the answer
    _alive: bool = True  # the structure allows what was seen since `_start`

    def __post_init__(self) -> None:
        self._reset()

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        self._follow(output)
        if self._free:
            for ids in (self.marker.eos_ids, self.marker.overruns[self._begun]):
                scores[ids[ids < len(scores)]] = -np.inf
            return
        allowed = np.zeros(len(scores), np.bool_)
        if self._alive:
            allowed = self.guided.allowed([] if self._start is None else output[self._start :], len(scores))
        if self._start is None:
            spaces = self.marker.spaces[self.marker.n_bytes <= _GAP - self._gap]
            allowed[spaces[spaces < len(scores)]] = True
        if self._head is not None:
            openers = self.marker.openers[len(self._head)]
            allowed[openers[openers < len(scores)]] = True
        scores[~allowed] = -np.inf

    def complete(self, output: Sequence[int]) -> bool:
        self._follow(output)
        decided = not self._free and self._head is None and self._start is not None
        return decided and self.guided.complete(output[self._start :])

    def _reset(self) -> None:
        self._seen, self._begun, self._gap, self._start, self._alive = [], 0, 0, None, True
        self._free = not self.marker.begin
        self._head = b"" if self.marker.begin else None

    def _follow(self, output: Sequence[int]) -> None:
        if self._seen != output[: len(self._seen)]:
            self._reset()
        for token in output[len(self._seen) :]:
            self._take(token)
            self._seen.append(token)

    def _take(self, token: int) -> None:
        raw = self.marker.token_bytes[token]
        if self._free:
            self._reason(raw)
            return
        if self._head is not None:
            head = self._head + raw if self._head else raw.lstrip(_SPACE)
            if head.startswith(self.marker.begin):
                self._head, self._free, self._gap, self._start = None, True, 0, None
                self._alive = True
                self._reason(head[len(self.marker.begin) :])
                return
            self._head = head if self.marker.begin.startswith(head) else None
        if self._start is not None:
            self._alive = self._alive and (self._head is None or self.guided.takes(self._seen[self._start :], token))
        elif self.guided.takes([], token):  # the structure comes first, if it takes white space
            self._start = len(self._seen)
        elif raw.strip(_SPACE):
            self._start, self._alive = len(self._seen), self._head is None
        else:
            self._gap += len(raw)

    def _reason(self, raw: bytes) -> None:
        text = self.marker.text[: self._begun] + raw
        _, found, rest = text.partition(self.marker.text)
        self._begun = self.marker.begun(text)
        if found:
            self._free, self._gap = False, len(rest)
