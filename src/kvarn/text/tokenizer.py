"""The tokenizer of a model: text to token ids and back.

Contract: immutable and thread-safe. With a GGUF vocabulary, `encode` gives the ids that llama.cpp gives.
`decode(encode(text))` is the text if it has no control tokens. There is one exception: SentencePiece
turns U+2581 into a space. `encode` recognizes control tokens in a text only if `special`, so that a
user's text cannot start a turn. Non-goals: chat templates (chat.py), an end-of-sequence token,
truncation, batches.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarn.text import from_folder, from_gguf
from kvarn.text.encoders import Encoder, SentencePiece
from kvarn.text.infill import Extra, GapMarkers
from kvarn.text.quoting import NO_STAND_INS, StandIns
from kvarn.text.token_bytes import TokenBytes
from kvarn.text.vocabulary import Vocabulary

Prompt = str | Sequence[int]  # text, or token ids


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` keys and `general.name` of a GGUF file. Arrays may be lists or NumPy arrays."""
        return cls(*from_gguf.read(metadata))

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """From a model folder with tokenizer.json, in the format of the Hugging Face hub."""
        return cls(*from_folder.read(Path(path)))

    def encode(
        self, text: str, *, bos: bool | None = None, special: bool = False, stand_ins: StandIns = NO_STAND_INS
    ) -> list[int]:
        """`bos=None`: as the model defines it. BOS is not added if the text already begins with it. `stand_ins`: the
        text was made from quoted texts (quoting.py)."""
        ids = self._encoder.encode(text, special, stand_ins)
        add_bos = self.add_bos if bos is None else bos
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_gap(self, before: str, after: str, extra: Sequence[Extra] = ()) -> list[int] | None:
        """A prompt whose answer belongs between the two texts. None if the model has no markers for that."""
        if self.markers is None:
            return None
        ids = self.markers.prompt(lambda text: self._encoder.encode(text, False, NO_STAND_INS), before, after, extra)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD. Control tokens appear only if `special`."""
        return b"".join(map(self.pieces(special=special).push, ids)).decode("utf-8", "replace")

    def pieces(self, *, special: bool = False, shown: Container[int] = ()) -> TokenBytes:
        """A stream of the bytes that `decode` joins, token by token. `shown`: control tokens that appear even if not
        `special`."""
        return TokenBytes(self._vocabulary, special, shown)

    def control_in(self, texts: Iterable[str]) -> frozenset[int]:
        """The control tokens whose names are in one of these texts, without those that end a turn."""
        texts, name_of = list(texts), self._vocabulary.tokens
        found = (id for id in self._vocabulary.control if id not in self.eos_ids)
        return frozenset(id for id in found if name_of[id] and any(name_of[id] in text for text in texts))

    def token_bytes(self, id: int) -> bytes:
        """The bytes of the token, independent of its place in a text. Those of a control token are its name."""
        return self._vocabulary.bytes_of(id)

    @property
    def is_sentence_piece(self) -> bool:
        return isinstance(self._encoder, SentencePiece)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def control_ids(self) -> frozenset[int]:
        """The tokens that are no text: `decode` writes them only if `special`."""
        return self._vocabulary.control

    @property
    def control_texts(self) -> Sequence[str]:
        """The texts that `encode` recognizes only if `special`."""
        return self._encoder.control

    @property
    def plain_texts(self) -> Sequence[str]:
        """The texts of tokens that `encode` recognizes as a whole in any text."""
        return self._encoder.plain

    @property
    def markers(self) -> GapMarkers | None:
        return self._vocabulary.markers

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end a turn. The model's end-of-sequence token comes first."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        return self._vocabulary.add_bos

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
