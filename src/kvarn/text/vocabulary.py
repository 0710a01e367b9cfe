"""What a tokenizer knows about its tokens apart from how text becomes tokens.

Contract: a frozen record, the same whether it came from a GGUF file or from a folder; checked once, here.
Non-goals: encoding, reading files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvarn.errors import KvarnError

# Control tokens that end a turn although the model's end-of-sequence token is another one.
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

# Where encoding puts a space before text: nowhere, before the first text, or also after every token matched as a whole.
SpacePrefix = Literal["never", "first", "always"]


@dataclass(frozen=True)
class Vocabulary:
    tokens: Sequence[str]
    spelled: Callable[[str], bytes]  # text of an ordinary token -> its bytes
    control: frozenset[int]  # hidden in text; matched in text only on request
    plain: frozenset[int]  # matched as a whole in any text, and spelled as written
    unused: frozenset[int] = frozenset()  # spell nothing
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    space_prefix: SpacePrefix = "never"
    chat_template: str | None = None

    def __post_init__(self) -> None:
        known = (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,)))
        for id in known:
            if not 0 <= id < len(self.tokens):
                raise KvarnError(f"special token id {id} is outside the vocabulary of {len(self.tokens)} tokens")
        if self.add_bos and self.bos_id is None:
            raise KvarnError("the model wants a BOS token and names none: set its bos_token_id or clear add_bos_token")

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
    """The ids the model names, then control tokens that are known to end a turn; each once."""
    texts = {tokens[id]: id for id in control if id < len(tokens)}
    if "<|return|>" in texts:  # in this dialogue format <|end|> closes a message, not the turn
        texts.pop("<|end|>", None)
    candidates = [*named, *(texts.get(text) for text in END_OF_TURN)]
    return tuple(dict.fromkeys(id for id in candidates if id is not None))
