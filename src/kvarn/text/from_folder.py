"""Reads a tokenizer from a model folder in the format of the Hugging Face hub.

Contract: tokenizer.json defines how text becomes tokens. tokenizer_config.json, special_tokens_map.json,
generation_config.json and chat_template.jinja are optional and give the special tokens and the template.
The files are not trusted: a fault raises `BadModel`, and memory stays in proportion to the files.
Non-goal: tokenizers that are Python code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from kvarn.errors import BadModel
from kvarn.settings import Settings
from kvarn.text import alphabet
from kvarn.text.encoders import Encoder, TokenizerJson, library_call
from kvarn.text.infill import find_markers
from kvarn.text.vocabulary import SpacePrefix, Vocabulary, end_ids

T = TypeVar("T")

_MOST_BYTES = 128 << 20  # of a file; the largest published tokenizer.json has about 35 MB
_AGAIN = "download it again"


def _read(file: Path) -> str | None:
    """The text of a file, or None if there is no such file."""
    try:
        if not file.exists():
            return None
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            raise BadModel(f"{file} is no file of at most {_MOST_BYTES >> 20} MiB; {_AGAIN}")
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(f"{file} cannot be read ({error}); {_AGAIN}") from None


def _object(file: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{file} is not JSON ({error}); {_AGAIN}") from None
    if not isinstance(content, dict):
        raise BadModel(f"{file} is not a JSON object; {_AGAIN}")
    return content


def _settings(file: Path) -> Settings:
    return Settings(str(file), _object(file, _read(file) or "{}"))


def _library_call(file: Path, call: Callable[[], T]) -> T:
    return library_call(call, lambda error: f"{file} cannot be used ({error}); {_AGAIN} or update `tokenizers`")


def _match_before_normalizing(definition: dict[str, Any]) -> bool:
    """Whether `definition` had to be changed for this: a text must not become a control token by normalization."""
    added = definition.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    late = [token for token in tokens if token.get("special") and token.get("normalized")]
    for token in late:
        token["normalized"] = False
    return bool(late)


def _name(settings: Settings, key: str) -> str:
    """The text of a special token. The file has either the text or an object with the text."""
    if isinstance(settings.get(key), dict):
        return settings.inside(key).text("content", "")
    return settings.text(key, "")


def _ends(generation: Settings) -> list[int]:
    ids = generation.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(id) is int for id in ids):
        raise generation.bad("eos_token_id", "a token id or a list of token ids")
    return ids


def _template(path: Path, config: Settings) -> str | None:
    if (source := _read(path / "chat_template.jinja")) is not None:
        return source
    several = config.get("chat_template")
    if not isinstance(several, list):
        return config.optional_text("chat_template")
    if not all(isinstance(each, dict) for each in several):
        raise config.bad("chat_template", "a template or a list of templates with names")
    entries = [Settings(f"{config.where}: chat_template", each) for each in several]
    return {each.text("name"): each.text("template") for each in entries}.get("default")


def _parts(section: Any, kind: str) -> list[dict[str, Any]]:
    """The parts of a section of tokenizer.json that have this type. A section is one part or a sequence of parts."""
    if not isinstance(section, dict):
        return []
    lists = [section[name] for name in ("decoders", "normalizers", "pretokenizers") if section.get(name)]
    parts = lists[0] if lists and isinstance(lists[0], list) else [section]
    return [part for part in parts if isinstance(part, dict) and part.get("type") == kind]


def _space_prefix(definition: dict[str, Any]) -> SpacePrefix:
    if _parts(definition.get("normalizer"), "Prepend"):
        return "always"
    for part in _parts(definition.get("pre_tokenizer"), "Metaspace"):
        for scheme in ("never", "first"):
            if part.get("prepend_scheme") == scheme:
                return scheme
        return "always"
    return "never"


def _tokens(file: Path, vocab: dict[str, int]) -> list[str]:
    """Tokens by id. An id without a token has an empty text."""
    most = 2 * len(vocab) + 65536  # published vocabularies have few gaps
    highest = max(vocab.values(), default=-1)
    if not 0 <= highest < most:
        raise BadModel(f"{file} has {len(vocab)} tokens, and the highest id is {highest}; {_AGAIN}")
    tokens = [""] * (highest + 1)
    for token, id in vocab.items():
        tokens[id] = token
    return tokens


def read(path: Path) -> tuple[Vocabulary, Encoder]:
    file = path / "tokenizer.json"
    text = _read(file)
    if text is None:
        raise BadModel(f"no tokenizer.json in {path}: download it with the model's other files")
    definition = _object(file, text)
    model = Settings(str(file), definition).inside("model")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        model.refuse(affix, ("",), "prefixes and suffixes of subwords")
    changed = _match_before_normalizing(definition)
    source = json.dumps(definition) if changed else text
    library = _library_call(file, lambda: tokenizers.Tokenizer.from_str(source))
    if getattr(library.model, "dropout", None):
        library.model.dropout = None  # for training: it would choose tokens at random
    library.no_truncation()
    library.no_padding()
    if (kind := type(library.model).__name__) != "BPE":
        raise BadModel(f"{file} holds a {kind} model, which is not implemented; there is BPE")
    special = _settings(path / "special_tokens_map.json")
    config = _settings(path / "tokenizer_config.json")
    config = Settings(config.where, {**special.values, **config.values})

    vocab = library.get_vocab(with_added_tokens=True)
    tokens = _tokens(file, vocab)
    added = library.get_added_tokens_decoder()
    control = frozenset(id for id, token in added.items() if token.special)
    bos = vocab.get(_name(config, "bos_token"))
    eos = vocab.get(_name(config, "eos_token"))
    empty = _library_call(file, lambda: library.encode("", add_special_tokens=True).ids)
    vocabulary = Vocabulary(
        tokens=tokens,
        spelled=alphabet.byte_level if _parts(definition.get("decoder"), "ByteLevel") else alphabet.sentencepiece,
        control=control,
        plain=frozenset(added) - control,
        bos_id=bos,
        eos_ids=end_ids(tokens, control, [eos, *_ends(_settings(path / "generation_config.json"))]),
        add_bos=bos is not None and config.flag("add_bos_token", empty[:1] == [bos]),
        space_prefix=_space_prefix(definition),
        chat_template=_template(path, config),
        markers=find_markers(tokens, sorted(added), {}),
    )
    return vocabulary, TokenizerJson(library)
