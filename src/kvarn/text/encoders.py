"""Encoders: text to token ids, one class per kind of vocabulary.

Contract: `encode(text, special)` recognizes control tokens only if `special`. Thread-safe. Non-goals:
the BOS token, decoding.
"""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models

from kvarn import native
from kvarn.errors import KvarnError
from kvarn.text.pretokenizers import IGNORE_MERGES, pretokenizer


class Encoder(Protocol):
    def encode(self, text: str, special: bool) -> list[int]: ...


@dataclass(frozen=True)
class Markers:
    """Tokens that are matched as a whole in the text, before it is encoded. All lists have one entry per token."""

    texts: list[str]
    ids: list[int]
    always: list[bool]  # False: matched only if control tokens are asked for
    strips_right: list[bool]  # the white space after the token is removed


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise KvarnError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at {error.start}, which is not a "
            "character: remove it or replace it by U+FFFD"
        ) from None


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

    def encode(self, text: str, special: bool) -> list[int]:
        return self._native.encode(utf8(text), special)


_ABSENT = "\0"  # cannot occur in a word, because the byte-level alphabet has no control characters


class ByteLevel:
    def __init__(self, tokens: Sequence[str], merges: Sequence[str], markers: Markers, pre: str) -> None:
        # A byte without a token is removed after merging, so that its neighbours do not merge with each other.
        self._absent = len(tokens)
        vocab = {token: id for id, token in enumerate(tokens)} | {_ABSENT: self._absent}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        cut = pretokenizer(pre)
        try:
            model = models.BPE(vocab, pairs, unk_token=_ABSENT, ignore_merges=pre in IGNORE_MERGES)
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            raise KvarnError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
        self._words = tokenizers.Tokenizer(model)
        self._words.pre_tokenizer = cut
        self._markers = native.Markers(markers.texts, markers.ids, markers.always, markers.strips_right)

    def encode(self, text: str, special: bool) -> list[int]:
        raw = utf8(text)
        ids: list[int] = []
        for id, begin, end in self._markers.split(raw, special):
            if id >= 0:
                ids.append(id)
            else:
                ids += unlocked(self._words, raw[begin:end].decode())
        return [id for id in ids if id != self._absent] if self._absent in ids else ids


class _Unlocked:
    """Encodes without Python's lock, until the interpreter exits: Python then ends daemon threads that ask for the
    lock, and inside the library that would abort the process (native/unlocked.hpp has the same for our own code)."""

    def __init__(self) -> None:
        self._exiting = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._finish)

    def _begin(self) -> None:
        self._idle = Condition()
        self._n_running = 0

    def __call__(self, library: tokenizers.Tokenizer, text: str) -> list[int]:
        with self._idle:
            unlocked = not self._exiting
            self._n_running += unlocked
        ids: list[int]
        if not unlocked:
            ids = library.encode(text, add_special_tokens=False).ids
            return ids
        try:  # a batch of one: the library releases the lock only for batches
            ids = library.encode_batch([text], add_special_tokens=False)[0].ids
        finally:
            with self._idle:
                self._n_running -= 1
                self._idle.notify_all()
        return ids

    def _finish(self) -> None:
        """Wait for the calls under way."""
        with self._idle:
            self._exiting = True
            self._idle.wait_for(lambda: not self._n_running)


unlocked = _Unlocked()


class TokenizerJson:
    """Encodes with the `tokenizers` library, which defines the format of tokenizer.json."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._lock = Lock()  # `encode_special_tokens` is a state of the library's object

    def encode(self, text: str, special: bool) -> list[int]:
        utf8(text)
        with self._lock:
            self._library.encode_special_tokens = not special
            return unlocked(self._library, text)
