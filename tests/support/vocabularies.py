"""Small vocabularies in the form of GGUF metadata, to show one rule at a time without a model."""

from typing import Any

from kvarn.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def _printable() -> list[str]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in kept] + [chr(0x100 + i) for i in range(256 - len(kept))]


def spm(
    words: dict[str, float],
    user_defined: tuple[str, ...] = (),
    byte_tokens: bool = True,
    control: tuple[str, ...] = (),
    **keys: Any,
) -> dict[str, Any]:
    """<unk> <s> </s>, the 256 bytes, then `words` with their scores, then user-defined tokens, then more control
    tokens."""
    entries: list[tuple[str, float, int]] = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
    entries += [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)] if byte_tokens else []
    entries += [(word, score, NORMAL) for word, score in words.items()]
    entries += [(word, -1000, USER_DEFINED) for word in user_defined]
    entries += [(word, 0, CONTROL) for word in control]
    tokens, scores, types = zip(*entries, strict=True)
    metadata = {"model": "llama", "tokens": list(tokens), "scores": list(scores), "token_type": list(types)}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def bpe(
    merges: tuple[str, ...] = (),
    control: tuple[str, ...] = (),
    without: str = "",
    pre: str = "gpt-2",
    user_defined: tuple[str, ...] = (),
    **keys: Any,
) -> dict[str, Any]:
    """The characters that stand for bytes (except `without`), what `merges` make of them, then control tokens, then
    user-defined tokens."""
    words = [character for character in _printable() if character not in without]
    words += [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(words) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    tokens = [*words, *control, *user_defined]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(merges)}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def control_ids(tokenizer: Tokenizer) -> set[int]:
    """Tokens that `decode` hides unless `special`."""
    ids = range(tokenizer.vocab_size)
    return {id for id in ids if tokenizer.decode([id], special=True) and not tokenizer.decode([id])}
