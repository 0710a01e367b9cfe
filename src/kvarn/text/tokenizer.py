"""The tokenizer of a model: text to token ids and back.

Contract: immutable and thread-safe. `encode` of a GGUF vocabulary gives what llama.cpp gives; `decode(encode(text))` is
the text if it has no control tokens (but SentencePiece cannot tell U+2581 from a space). Control tokens in a text are
recognized only on request, so that what a user types cannot open a turn.
Non-goals: chat templates (chat.py), appending an end-of-sequence token, truncation, batches.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvarn.text import from_folder, from_gguf
from kvarn.text.encoders import Encoder
from kvarn.text.token_bytes import TokenBytes
from kvarn.text.vocabulary import Vocabulary


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF file (and `general.name`). Arrays may be lists or NumPy arrays."""
        return cls(*from_gguf.read(metadata))

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """From tokenizer.json and the files beside it, as models are published on the Hugging Face hub."""
        return cls(*from_folder.read(Path(path)))

    def encode(self, text: str, *, bos: bool | None = None, special: bool = False) -> list[int]:
        """`bos=None`: what the model says. A BOS that the text brings along (`special`) is not doubled."""
        ids = self._encoder.encode(text, special)
        wanted = self.add_bos if bos is None else bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD; control tokens are shown only if `special`."""
        return b"".join(map(self.pieces(special=special).push, ids)).decode("utf-8", "replace")

    def pieces(self, *, special: bool = False) -> TokenBytes:
        """The bytes that `decode` is made of, one token after the other."""
        return TokenBytes(self._vocabulary, special)

    def token_bytes(self, id: int) -> bytes:
        """What the token spells, wherever it stands; a control token spells its name."""
        return self._vocabulary.bytes_of(id)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a turn. The model's own end-of-sequence token comes first."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        return self._vocabulary.add_bos

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: `decode` hides them, `encode` finds them only with `special=True`."""
        return self._vocabulary.control

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    @property
    def bos_token(self) -> str:
        """The text of the BOS token, for chat templates; empty if there is none."""
        return "" if self.bos_id is None else self._vocabulary.tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        return self._vocabulary.tokens[self.eos_ids[0]] if self.eos_ids else ""
