"""Encoders: text to token ids, one class per kind of vocabulary.

Contract: `encode(text, special)` recognizes control tokens only if `special`, and before stand-ins
(quoting.py) become characters again. Thread-safe. Non-goals: the BOS token, decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, normalizers

from kvarn import native
from kvarn.errors import BadModel, KvarnError
from kvarn.text.pretokenizers import IGNORE_MERGES, pretokenizer
from kvarn.text.quoting import NO_STAND_INS, StandIns, restored
from kvarn.text.unlocked import unlocked

T = TypeVar("T")


class Encoder(Protocol):
    @property
    def control(self) -> Sequence[str]: ...  # texts of control tokens
    @property
    def plain(self) -> Sequence[str]: ...  # texts of tokens that are matched in any text
    def encode(self, text: str, special: bool, stand_ins: StandIns = NO_STAND_INS) -> list[int]: ...


@dataclass(frozen=True)
class Markers:
    """Tokens that are matched as a whole in the text, before it is encoded. All lists have one entry per token."""

    texts: list[str]
    ids: list[int]
    always: list[bool]  # False: matched only if control tokens are asked for
    strips_right: list[bool]  # the white space after the token is removed

    @property
    def control(self) -> list[str]:
        return [text for text, always in zip(self.texts, self.always, strict=True) if not always]

    @property
    def plain(self) -> list[str]:
        return [text for text, always in zip(self.texts, self.always, strict=True) if always]

    @property
    def compiled(self) -> native.Markers:
        return native.Markers(self.texts, self.ids, self.always, self.strips_right)


def library_call(call: Callable[[], T], message: Callable[[BaseException], str]) -> T:
    """`tokenizers` raises plain Exception, and a BaseException of its own where it has a bug."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001
        raise BadModel(message(error)) from None


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise KvarnError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at {error.start}, which is not a "
            "character: remove it or replace it by U+FFFD"
        ) from None


def _encode_quoted(
    markers: native.Markers, text: str, special: bool, stand_ins: StandIns, encode: Callable[[str, bool], list[int]]
) -> list[int]:
    raw = utf8(text)
    ids: list[int] = []
    for id, begin, end in markers.split(raw, special):
        ids += [id] if id >= 0 else encode(restored(raw[begin:end].decode(), stand_ins), False)
    return ids


class SentencePiece:
    """Native code, because `tokenizers` needs a list of merges, which takes seconds to derive from the scores."""

    def __init__(
        self, tokens: Sequence[str], scores: NDArray[np.float32], markers: Markers, space_prefix: bool, unknown: int
    ) -> None:
        self._native = native.Spm(
            list(tokens),
            np.ascontiguousarray(scores, np.float32),
            markers.texts,
            markers.ids,
            markers.always,
            markers.strips_right,
            space_prefix,
            unknown,
        )
        self._markers = markers.compiled
        self.control, self.plain = markers.control, markers.plain

    def encode(self, text: str, special: bool, stand_ins: StandIns = NO_STAND_INS) -> list[int]:
        if stand_ins:
            return _encode_quoted(self._markers, text, special, stand_ins, self.encode)
        return self._native.encode(utf8(text), special)


_ABSENT = "\0"  # cannot occur in a word, because the byte-level alphabet has no control characters


class ByteLevel:
    def __init__(self, tokens: Sequence[str], merges: Sequence[str], markers: Markers, pre: str) -> None:
        # A byte without a token is removed after merging, so that its neighbours do not merge with each other.
        self._absent = len(tokens)
        vocab = {token: id for id, token in enumerate(tokens)} | {_ABSENT: self._absent}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        cut = pretokenizer(pre)
        model = library_call(
            lambda: models.BPE(vocab, pairs, unk_token=_ABSENT, ignore_merges=pre in IGNORE_MERGES),
            lambda error: f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}",
        )
        self._words = tokenizers.Tokenizer(model)
        self._words.pre_tokenizer = cut
        self._markers = markers.compiled
        self.control, self.plain = markers.control, markers.plain

    def encode(self, text: str, special: bool, stand_ins: StandIns = NO_STAND_INS) -> list[int]:
        if stand_ins:
            return _encode_quoted(self._markers, text, special, stand_ins, self.encode)
        raw = utf8(text)
        ids: list[int] = []
        for id, begin, end in self._markers.split(raw, special):
            if id >= 0:
                ids.append(id)
            else:
                ids += _words(self._words, raw[begin:end].decode())
        return [id for id in ids if id != self._absent] if self._absent in ids else ids


def _words(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return library_call(
        lambda: unlocked(library, text),
        lambda error: f"the model's tokenizer cannot encode a text ({error}): use another model",
    )


class TokenizerJson:
    """Encodes with the `tokenizers` library, which defines the format of tokenizer.json.

    No control token of `library` may be `normalized`: the library would match it after stand-ins are turned back.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._lock = Lock()  # `encode_special_tokens` and `normalizer` are states of the library's object
        added = library.get_added_tokens_decoder().values()
        self.control = [token.content for token in added if token.special]
        self.plain = [token.content for token in added if not token.special]

    def encode(self, text: str, special: bool, stand_ins: StandIns = NO_STAND_INS) -> list[int]:
        utf8(text)
        with self._lock:
            self._library.encode_special_tokens = not special
            return self._encode_quoted(text, stand_ins) if stand_ins else _words(self._library, text)

    def _encode_quoted(self, text: str, stand_ins: StandIns) -> list[int]:
        """Normalization is the step between matching control tokens and encoding the text between them."""
        normalizer = self._library.normalizer
        restoring = [normalizers.Replace(old, new) for old, new in stand_ins.items() if old in text]
        self._library.normalizer = normalizers.Sequence([*restoring, *([normalizer] if normalizer else [])])
        try:
            return _words(self._library, text)
        finally:
            self._library.normalizer = normalizer
