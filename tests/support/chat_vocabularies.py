"""Vocabularies of every kind with the control tokens of support/chat_templates.py."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from support.chat_templates import CONTROL, PLAIN
from support.vocabularies import bpe, spm
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from kvarn.text.tokenizer import Tokenizer

_MERGES = ("< |", "a b", "Ġ a", "> Ċ", "Ċ Ċ", "| >")
_WORDS = {
    "▁": -1.0,
    "a": -1.0,
    "▁a": -2.0,
    "▁▁": -3.0,
    "<": -1.0,
    ">": -1.0,
    "|>": -4.0,
    "<|": -3.0,
    "im": -2.0,
    "[": -1,
}
_ALL = ("<unk>", "<s>", "</s>", *CONTROL)


def _bpe(pre: str) -> Tokenizer:
    metadata = bpe(_MERGES, control=_ALL, pre=pre, user_defined=PLAIN, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {f"tokenizer.ggml.{name}_token_id": tokens.index(text) for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    return Tokenizer.from_gguf(metadata | ids)


def _spm(name: str = "", **keys: Any) -> Tokenizer:
    metadata = spm(_WORDS, user_defined=PLAIN, control=CONTROL, add_bos_token=False, **keys)
    return Tokenizer.from_gguf(metadata | {"general.name": name})


def _folder(library: tokenizers.Tokenizer, **added: bool) -> Tokenizer:
    library.add_special_tokens([AddedToken(text, **({"normalized": False} | added)) for text in _ALL])
    library.add_tokens([AddedToken(text, normalized=text == "<b>") for text in PLAIN])
    with tempfile.TemporaryDirectory() as folder:
        library.save(f"{folder}/tokenizer.json")
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(names))
        return Tokenizer.from_folder(folder)


def _byte_level(**added: bool) -> Tokenizer:
    metadata = bpe(_MERGES)
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [tuple(m.split(" ")) for m in _MERGES]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return _folder(library, **added)


def _metaspace(scheme: str | None, **added: bool) -> Tokenizer:
    """With scheme None, spaces are a matter of normalization, as in Llama 2."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    vocab = {word: id for id, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "▁"), ("<", "|")]
    vocab |= {"|": len(vocab)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if scheme is None:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _folder(library, **added)


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "bpe qwen2": partial(_bpe, "qwen2"),
    "bpe llama-bpe": partial(_bpe, "llama-bpe"),
    "spm": _spm,
    "spm without prefix": partial(_spm, add_space_prefix=False),
    "spm phi3": partial(_spm, "Phi3"),
    "folder byte level": _byte_level,
    "folder byte level, normalized": partial(_byte_level, normalized=True),
    "folder byte level, rstrip": partial(_byte_level, rstrip=True, lstrip=True),
    "folder first": partial(_metaspace, "first"),
    "folder always": partial(_metaspace, "always"),
    "folder prepend, normalized": partial(_metaspace, None, normalized=True),
    "folder prepend, rstrip": partial(_metaspace, None, rstrip=True),
}
