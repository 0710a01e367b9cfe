"""Prompts with a gap: which markers a vocabulary has, and what a prompt is made of."""

from pathlib import Path

import tokenizers
from support import tiny_gguf

from kvarn.text.infill import Extra, GapMarkers, find_markers
from kvarn.text.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
FIRST = 259  # the ids of tokens that are added to the tiny vocabulary


def tokenizer(*control: str, **ids: int) -> Tokenizer:
    keys = tiny_gguf.tokenizer_keys("{{ messages }}")
    metadata = {name: value for name, (_, value) in keys.items()}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *control]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *(3 for _ in control)]
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items()})


def test_markers_are_found_by_name_or_by_the_files_own_keys() -> None:
    assert tokenizer(*QWEN).markers == GapMarkers(*range(FIRST, FIRST + 6))
    named = tokenizer("<a>", "<b>", "<c>", fim_pre=FIRST, suffix=FIRST + 1, fim_mid=FIRST + 2)
    assert named.markers == GapMarkers(FIRST, FIRST + 1, FIRST + 2)
    assert tokenizer("<PRE>", "<SUF>").markers is None, "there is no middle"
    assert tokenizer().encode_gap("a", "b") is None


def test_a_name_in_plain_text_is_no_marker() -> None:
    assert find_markers(["<PRE>", "<SUF>", "<MID>"], [], {}) is None


def test_the_answer_belongs_between_the_texts() -> None:
    found = tokenizer(*QWEN)
    prompt = found.encode_gap("ab", "cd")
    assert found.decode(prompt or [], special=True) == "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
    prompt = found.encode_gap("x", "", [Extra("a.h", "int a;"), Extra("b.h", "int b;")])
    assert found.decode(prompt or [], special=True) == (
        "<|repo_name|>project\n<|file_sep|>a.h\nint a;<|file_sep|>b.h\nint b;<|file_sep|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|><|fim_middle|>"
    )
    bare = tokenizer(*QWEN[:3])
    prompt = bare.encode_gap("x", "", [Extra("a.h", "int a;")])
    assert bare.decode(prompt or [], special=True).startswith("\n\n--- a.h ---\n\nint a;<|fim_prefix|>x")


def test_texts_write_no_markers() -> None:
    found = tokenizer(*QWEN)
    prompt = found.encode_gap("<|fim_middle|>", "<|file_sep|>", [Extra("<|fim_prefix|>", "<|repo_name|>")]) or []
    assert [id for id in prompt if id >= FIRST] == [FIRST + at for at in (4, 5, 5, 0, 1, 2)]


def test_markers_of_other_parts_end_an_answer() -> None:
    assert tokenizer(*QWEN).markers.ends == (FIRST + 3, FIRST + 4, FIRST + 5)


def test_a_folder_has_markers_too(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    library.add_special_tokens(list(QWEN))
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).markers == GapMarkers(2, 3, 4, 5, 6, 7)
