"""The state of one sample that follows a structure: the constraint that the engine asks.

Contract: `mask` and `complete` are functions of the answer's tokens. The state only saves work: it takes the
tokens that are new, and begins again if the tokens that it has seen are not those of the answer. So
preemption, forks and repeated steps need nothing from it. One thread at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Doubles
from kvarn.errors import KvarnError
from kvarn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_GAP = 8  # bytes of white space that may come between a marker and the structure
_SPACE = b" \n\r\t"


class Guided:
    """Follows a structure from its first token."""

    def __init__(self, fresh: "LLMatcher") -> None:
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._seen: list[int] = []

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        scores[~self.allowed(output, len(scores))] = -np.inf

    def allowed(self, output: Sequence[int], n_tokens: int) -> NDArray[np.bool_]:
        """[n_tokens]"""
        self._follow(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=n_tokens, bitorder="little").view(np.bool_)

    def takes(self, output: Sequence[int], token: int) -> bool:
        """Whether the token may come next."""
        self._follow(output)
        return self._matcher.validate_tokens([token]) == 1

    def complete(self, output: Sequence[int]) -> bool:
        """Whether nothing but the end token can come next."""
        self._follow(output)
        return self._matcher.is_stopped()

    def _follow(self, output: Sequence[int]) -> None:
        n = len(self._seen)
        if self._seen != output[:n]:
            self._matcher, self._seen, n = self._fresh.deep_copy(), [], 0
        for token in output[n:]:
            self._matcher.consume_token(token)
            self._seen.append(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise KvarnError(f"the structure of this request cannot be followed further: {reason}")


@dataclass(frozen=True)
class Marker:
    """A text after which a structure begins, and the tokens that matter for it."""

    text: bytes
    token_bytes: Sequence[bytes]  # by id; those of a control token are its name
    eos_ids: NDArray[np.intp]
    spaces: NDArray[np.intp]  # tokens of white space
    n_bytes: NDArray[np.intp]  # of `spaces`
    overruns: list[NDArray[np.intp]]  # by bytes of the marker that the answer has: tokens with the rest, and more

    @staticmethod
    def of(tokenizer: Tokenizer, text: str, eos_ids: tuple[int, ...]) -> "Marker":
        marker = text.encode()
        if not marker:
            raise KvarnError("the text after which a structure begins is empty: give None")
        tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        spaces = [id for id, token in enumerate(tokens) if token and not token.strip(_SPACE)]
        last = marker[-1:]
        longer = [id for id, token in enumerate(tokens) if token.partition(last)[2].strip(_SPACE)]
        overruns = []
        for n in range(len(marker)):
            texts = ((id, marker[:n] + tokens[id]) for id in longer)
            overruns.append([id for id, joined in texts if joined.partition(marker)[2].strip(_SPACE)])
        return Marker(
            marker,
            tokens,
            np.array(eos_ids, np.intp),
            np.array(spaces, np.intp),
            np.array([len(tokens[id]) for id in spaces], np.intp),
            [np.array(ids, np.intp) for ids in overruns],
        )

    def begun(self, text: bytes) -> int:
        """How many bytes at the end of the text begin the marker."""
        longest = min(len(self.text) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self.text[:n])), 0)


@dataclass
class Following:
    """Follows a structure after a marker: reasoning, the marker, white space, the structure."""

    guided: Guided
    marker: Marker
    _seen: list[int] = field(default_factory=list)
    _begun: int = 0  # bytes of the marker at the end of what was seen
    _gap: int | None = None  # bytes of white space after the marker; None: the marker has not come
    _start: int | None = None  # where the structure begins in the answer

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        self._follow(output)
        if self._start is not None:
            self.guided.mask(scores, output[self._start :])
        elif self._gap is not None:
            allowed = self.guided.allowed([], len(scores))
            spaces = self.marker.spaces[self.marker.n_bytes <= _GAP - self._gap]
            allowed[spaces[spaces < len(scores)]] = True
            scores[~allowed] = -np.inf
        else:
            for ids in (self.marker.eos_ids, self.marker.overruns[self._begun]):
                scores[ids[ids < len(scores)]] = -np.inf

    def complete(self, output: Sequence[int]) -> bool:
        self._follow(output)
        return self._start is not None and self.guided.complete(output[self._start :])

    def _follow(self, output: Sequence[int]) -> None:
        n = len(self._seen)
        if self._seen != output[:n]:
            self._seen, self._begun, self._gap, self._start, n = [], 0, None, None, 0
        for token in output[n:]:
            self._take(token)
            self._seen.append(token)

    def _take(self, token: int) -> None:
        if self._start is not None:
            return
        raw = self.marker.token_bytes[token]
        if self._gap is None:
            text = self.marker.text[: self._begun] + raw
            _, found, rest = text.partition(self.marker.text)
            self._begun = self.marker.begun(text)
            self._gap = len(rest) if found else None
        elif raw.strip(_SPACE) or self.guided.takes([], token):  # the structure comes first, if it takes white space
            self._start = len(self._seen)
        else:
            self._gap += len(raw)
