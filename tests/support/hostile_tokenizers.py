"""Tokenizer settings that are wrong: values of every type, and random damage to settings that work."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from support.chat_templates import CHATML, QWEN3
from support.vocabularies import bpe, spm

CONTROL = ("<|im_start|>", "<|im_end|>")
ODD: list[Any] = [None, 0, 1, -1, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 1.5, 1e300, float("nan"), True, False, "", "x"]
ODD += [
    "\0",
    "\x1b[31m",
    "\u202e",
    "é" * 3000,
    [],
    {},
    [1],
    ["a", "b"],
    [[]],
    [None],
    [2**70],
    {"a": 1},
    {"content": 7},
]
ODD += ["Regex", {"Regex": "(a+)+$"}, {"Regex": "("}, {"String": ""}, "ByteLevel", "Sequence", "a b c", "{{", "default"]
ODD += [[{"name": "default", "template": "x"}], [{"name": "default"}], [{"name": 1, "template": 2}], "{{ 'a' * 2 }}"]
ARRAYS: list[Any] = [np.array([1, 2], np.uint32), np.array([], np.uint8), np.array([np.nan] * 3, np.float32)]
ARRAYS += [np.array([True, False]), np.array([2**64 - 1], np.uint64), np.zeros(300, np.int32), np.full(300, 1e300)]
_KEYS = """
tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.scores
tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id
tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.add_bos_token tokenizer.chat_template
tokenizer.ggml.add_space_prefix general.name
"""
KEYS = _KEYS.split()
SECTIONS = [
    {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
    {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": []}, {"type": "Digits"}]},
]


def gguf_metadata() -> list[dict[str, Any]]:
    ids = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257, "tokenizer.chat_template": CHATML}
    byte_level = bpe(("a b", "c d"), control=CONTROL, user_defined=("<think>",)) | ids
    words = {"▁": -1.0, "a": -1.0, "▁a": -2.0}
    return [byte_level, spm(words, ("<think>",), control=CONTROL) | {"tokenizer.chat_template": QWEN3}]


def folder() -> dict[str, Any]:
    """The files of a folder that works."""
    metadata = bpe(("a b", "c d"))
    model = {
        "type": "BPE",
        "vocab": {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])},
        "merges": ["a b", "c d"],
        **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
    }
    added = [
        {"id": 258 + i, "content": text, "special": i < 2, "normalized": i == 1}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, text in enumerate((*CONTROL, "<think>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    tokenizer |= {"pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level, "model": model}
    config = {"bos_token": CONTROL[0], "eos_token": {"content": CONTROL[1]}, "add_bos_token": False}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config | {"chat_template": CHATML},
        "special_tokens_map.json": {"bos_token": CONTROL[0], "unk_token": None},
        "generation_config.json": {"eos_token_id": [259]},
    }


def damage_gguf(rng: random.Random) -> dict[str, Any]:
    metadata = dict(rng.choice(gguf_metadata()))
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(KEYS)
        value = metadata.get(key)
        if isinstance(value, list) and value and rng.random() < 0.5:
            value = list(value)
            value[rng.randrange(len(value))] = rng.choice(ODD)
            metadata[key] = value[: rng.choice((1, len(value) - 1, len(value), len(value)))]
        else:
            metadata[key] = copy.deepcopy(rng.choice(ODD + ARRAYS))
    return metadata


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, each in list(inside)[:40] for place in places(each, (*here, key)))]


def damage_json(rng: random.Random, content: Any) -> Any:
    place = rng.choice(places(content))
    if not place:
        return copy.deepcopy(rng.choice(ODD))
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    if isinstance(inside, dict) and rng.random() < 0.3:
        inside.pop(place[-1])
    else:
        inside[place[-1]] = copy.deepcopy(rng.choice(ODD))
    return content


def damage_folder(rng: random.Random, path: Path) -> None:
    files = folder()
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(["tokenizer.json", *files])
        files[name] = damage_json(rng, files[name])
    if rng.random() < 0.1 and isinstance(files["tokenizer.json"], dict):
        files["tokenizer.json"]["pre_tokenizer"] = rng.choice(SECTIONS)
    if rng.random() < 0.05:
        files["tokenizer.json"] = {
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 10 ** rng.randrange(10)}, "merges": []}
        }
    for name, content in files.items():
        raw = json.dumps(content).encode()
        if rng.random() < 0.05:
            raw = rng.choice(
                [raw[: rng.randrange(len(raw))], b"\xff" + raw, b"[" * 200_000, b'{"a":' * 200_000, b"9" * 9999]
            )
        (path / name).write_bytes(raw)
    if rng.random() < 0.05:
        (path / "chat_template.jinja").write_bytes(
            rng.choice([b"\xff", b"{% if %}", b"x", b"(" * 9999, b"{{" + b"(" * 9999])
        )
