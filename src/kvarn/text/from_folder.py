"""Reads a tokenizer from a model folder in the format of the Hugging Face hub.

Contract: tokenizer.json defines how text becomes tokens. tokenizer_config.json, special_tokens_map.json,
generation_config.json and chat_template.jinja are optional and give the special tokens and the template.
Non-goal: tokenizers that are Python code.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from kvarn.errors import KvarnError
from kvarn.text import alphabet
from kvarn.text.encoders import Encoder, TokenizerJson
from kvarn.text.vocabulary import SpacePrefix, Vocabulary, end_ids


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KvarnError(f"{path.name} in the model's folder cannot be read ({error}): download it again") from None
    if not isinstance(content, dict):
        raise KvarnError(f"{path.name} in the model's folder is not a JSON object: download it again")
    return content


def _open(path: Path, definition: dict[str, Any]) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise KvarnError(f"no tokenizer.json in {path}: download it with the model's other files")
    # A text must not become a control token by normalization, so control tokens are matched before it.
    late = [token for token in definition.get("added_tokens") or [] if token["special"] and token["normalized"]]
    for token in late:
        token["normalized"] = False
    try:
        if late:
            return tokenizers.Tokenizer.from_str(json.dumps(definition))
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise KvarnError(f"tokenizer.json cannot be read ({error}): download it again or update `tokenizers`") from None


def _name(value: Any) -> str | None:
    """The text of a special token. The file has either the text or an object with the text."""
    return value.get("content") if isinstance(value, dict) else value


def _template(path: Path, config: dict[str, Any]) -> str | None:
    if (file := path / "chat_template.jinja").exists():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates with names
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _parts(section: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """The parts of a section of tokenizer.json that have this type. A section is one part or a sequence of parts."""
    if section is None:
        return []
    parts = section.get("decoders") or section.get("normalizers") or section.get("pretokenizers") or [section]
    return [part for part in parts if part.get("type") == kind]


def _space_prefix(definition: dict[str, Any]) -> SpacePrefix:
    if _parts(definition.get("normalizer"), "Prepend"):
        return "always"
    for part in _parts(definition.get("pre_tokenizer"), "Metaspace"):
        scheme: SpacePrefix = part.get("prepend_scheme", "always")
        return scheme
    return "never"


def read(path: Path) -> tuple[Vocabulary, Encoder]:
    definition = _json(path / "tokenizer.json")
    library = _open(path, definition)
    library.no_truncation()
    library.no_padding()
    if (kind := definition["model"]["type"]) != "BPE":
        raise KvarnError(f"tokenizer.json holds a {kind} model, which is not implemented; there is BPE")
    config = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    generation = _json(path / "generation_config.json")

    vocab = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, id in vocab.items():
        tokens[id] = token
    added = library.get_added_tokens_decoder()
    control = frozenset(id for id, token in added.items() if token.special)
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    bos = vocab.get(_name(config.get("bos_token")) or "")
    begins = library.encode("", add_special_tokens=True).ids[:1] == [bos]
    add_bos = config.get("add_bos_token")
    vocabulary = Vocabulary(
        tokens=tokens,
        spelled=alphabet.byte_level if _parts(definition.get("decoder"), "ByteLevel") else alphabet.sentencepiece,
        control=control,
        plain=frozenset(added) - control,
        bos_id=bos,
        eos_ids=end_ids(tokens, control, [vocab.get(_name(config.get("eos_token")) or ""), *ends]),
        add_bos=bos is not None and (begins if add_bos is None else bool(add_bos)),
        space_prefix=_space_prefix(definition),
        chat_template=_template(path, config),
    )
    return vocabulary, TokenizerJson(library)
