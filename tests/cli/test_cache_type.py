"""Cache types on the command line: one for K and V, a pair, or llama.cpp's two options."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_gguf
from support.tiny_models import GOLDEN

from kvarn.cache.codec import codecs_of
from kvarn.cli import flags, main
from kvarn.cli.parser import Parser
from kvarn.errors import KvarnError


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "": "bf16",
        "--cache-type int8": "int8",
        "--cache-type int8/f16": "int8/f16",
        "--cache-type f16/f16": "f16",
        "-ctk int8": "int8/bf16",
        "-ctv int8": "bf16/int8",
        "-ctk int8 -ctv int4": "int8/int4",
        "-ctk int8 -ctv int8": "int8",
        "--cache-type f16 --cache-type-k f32": "f32/f16",
        "--cache-type int8/f16 -ctv bf16": "int8/bf16",
    }.items(),
)
def test_the_options_combine(words: str, expected: str) -> None:
    parser = Parser("kvarn")
    flags.add_cache_type_flags(parser, "bf16")
    assert flags.cache_type_of(parser.parse_args(words.split())) == expected


@pytest.mark.parametrize("name", ["int9", "int8/", "/int8", "int8/bf16/f16", "int8/int9", "", "int8 /bf16"])
def test_a_name_that_is_no_type_is_refused(name: str) -> None:
    with pytest.raises(
        KvarnError, match=r"unknown cache type .*; there are: f32, f16, bf16, int8, int6, int4, or two of them as K/V"
    ):
        codecs_of(name)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_way_of_saying_it_gives_the_same_answer(backend: str, tmp_path: Path, capsys) -> None:
    """With cells that have a tail."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT, replace(GOLDEN, context=512))
    prompt, answers = "a b c d e f g " * 9, set()
    for words in (
        "--cache-type int8/int4",
        "-ctk int8 -ctv int4",
        "--cache-type int8 -ctv int4 --cache contiguous -b 7",
    ):
        line = ["run", str(path), "-p", prompt, "-n", "9", "--backend", backend, "-t", "1", "--temperature", "0"]
        assert main([*line, *words.split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["prompt_tokens"] > 64
        answers.add(found["text"])
    assert len(answers) == 1
    assert main([*line[:5], "9", "--cache-type", "int4", "--block-size", "16"]) == 1
    said = capsys.readouterr().err
    assert said == "kvarn run: block size 16: int4 cells are made 32 tokens at a time; use 32 or more\n"


def test_strategies_lists_the_bytes_of_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    def nbytes(kind: str) -> int:
        assert main(["strategies", "--cache", "paged", "-c", "128", "-n", "100", "--cache-type", kind, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        return int(row["bytes"])

    assert 2 * nbytes("f32/f16") == nbytes("f32") + nbytes("f16")
