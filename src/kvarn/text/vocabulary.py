"""The tokens of a model and their properties.

Contract: a frozen record that does not depend on its source (a GGUF file or a folder). It checks itself.
Non-goals: encoding, reading files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvarn.errors import BadModel, KvarnError
from kvarn.text.infill import GapMarkers

# These control tokens also end a turn, even if the model's end-of-sequence token is another one.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<eos>",
    "</s>",
)

# Where encoding adds a space: nowhere, before the first text, or also after every token that is matched as a whole.
SpacePrefix = Literal["never", "first", "always"]


@dataclass(frozen=True)
class Vocabulary:
    tokens: Sequence[str]
    spelled: Callable[[str], bytes]  # text of an ordinary token -> its bytes
    control: frozenset[int]  # `encode` and `decode` use them only if `special`
    plain: frozenset[int]  # matched as a whole in any text; their bytes are their text
    unused: frozenset[int] = frozenset()  # they have no bytes
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    space_prefix: SpacePrefix = "never"
    chat_template: str | None = None
    markers: GapMarkers | None = None  # for filling in the middle

    def __post_init__(self) -> None:
        for id in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= id < len(self.tokens):
                raise BadModel(f"special token id {id} is outside the vocabulary of {len(self.tokens)} tokens")
        if self.add_bos and self.bos_id is None:
            raise BadModel("the model adds a BOS token but has none: set its bos_token_id or clear add_bos_token")

    def check(self, id: int) -> int:
        if not 0 <= id < len(self.tokens):
            raise KvarnError(f"token id {id} is outside the vocabulary of {len(self.tokens)} tokens")
        return id

    def bytes_of(self, id: int) -> bytes:
        token = self.tokens[self.check(id)]
        if id in self.control or id in self.plain:
            return token.encode()
        return b"" if id in self.unused else self.spelled(token)


def end_ids(tokens: Sequence[str], control: frozenset[int], named: Sequence[int | None]) -> tuple[int, ...]:
    """The ids that the model names, then the control tokens of END_OF_TURN, without duplicates."""
    texts = {tokens[id]: id for id in control if id < len(tokens)}
    if "<|return|>" in texts:  # in this chat format <|end|> ends a message, not the turn
        texts.pop("<|end|>", None)
    candidates = [*named, *(texts.get(text) for text in END_OF_TURN)]
    return tuple(dict.fromkeys(id for id in candidates if id is not None))
