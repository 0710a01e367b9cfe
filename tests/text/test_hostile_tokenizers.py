"""Tokenizer settings from hostile files: refused in one line, or they work; never a crash or much memory."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from attack_tokenizers import exercise, refusal
from support import tiny_gguf
from support.hostile_tokenizers import ARRAYS, KEYS, ODD, folder, gguf_metadata
from support.tiny_files import Keys

from kvarn.cli import main
from kvarn.errors import BadModel, KvarnError
from kvarn.text.tokenizer import Tokenizer

ATTACK = Path(__file__).parents[1] / "attack_tokenizers.py"


def test_every_gguf_key_with_every_kind_of_value() -> None:
    for metadata, key, value in product(gguf_metadata(), KEYS, ODD + ARRAYS):
        try:
            exercise(Tokenizer.from_gguf(metadata | {key: value}))
        except KvarnError as error:
            refusal(error)


def test_random_damage() -> None:
    """In a process with a limit on its memory; `--cases` can be any number."""
    command = [sys.executable, str(ATTACK), "--seed", "7", "--cases", "750"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "750 of 750 cases" in result.stdout
    assert "panicked" not in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 7}, "tokenizer.ggml.tokens is 7, not a list of texts"),
        ({"tokens": []}, r"tokenizer.ggml.tokens is \[\], not a list with a token"),
        ({"tokens": ["a", 1]}, r"tokenizer.ggml.tokens is \['a', 1\], not a list of texts"),
        ({"token_type": ["a"] * 259}, "tokenizer.ggml.token_type is .*, not a list of whole numbers"),
        ({"merges": "a b"}, "tokenizer.ggml.merges is 'a b', not a list of texts"),
        ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id is 'x', not a whole number"),
        ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id is True, not a whole number"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, not true or false"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3, not text"),
        ({"model": ["llama"]}, r"tokenizer.ggml.model is \['llama'\], not text"),
    ],
)
def test_wrong_types_in_a_gguf_file(change: dict[str, Any], message: str) -> None:
    metadata = gguf_metadata()[0] | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(BadModel, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("id", [-1, 2**32 - 1, 2**64 - 1])
def test_an_id_without_a_token_means_none(id: int) -> None:
    keys = {"tokenizer.ggml.bos_token_id": id, "tokenizer.ggml.eos_token_id": id}
    tokenizer = Tokenizer.from_gguf(gguf_metadata()[0] | keys)
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids == (259,), "by its name"


def vocab(**ids: int) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": ids, "merges": []}}


FAULTS: dict[str, tuple[str, bytes | dict[str, Any], str]] = {
    "id of 29 GiB": ("tokenizer.json", vocab(a=0, b=4_000_000_000), "has 2 tokens, and the highest id is 4000000000"),
    "id of 800 MB": ("tokenizer.json", vocab(a=0, b=100_000_000), "has 2 tokens, and the highest id is 100000000"),
    "no tokens": ("tokenizer.json", vocab(), "has 0 tokens"),
    "no model": ("tokenizer.json", {"version": "1.0"}, "tokenizer.json cannot be used"),
    "a model that is a list": ("tokenizer.json", {"model": []}, r"tokenizer.json: model is \[\], not a dictionary"),
    "not UTF-8": ("tokenizer.json", b"\xff\xfe{", "tokenizer.json cannot be read"),
    "deep lists": ("tokenizer.json", b"[" * 200_000, "tokenizer.json is not JSON"),
    "deep objects": ("tokenizer_config.json", b'{"a":' * 200_000, "tokenizer_config.json is not JSON"),
    "long number": (
        "generation_config.json",
        b'{"eos_token_id":' + b"9" * 9999 + b"}",
        "generation_config.json is not",
    ),
    "template 7": ("tokenizer_config.json", {"chat_template": 7}, "chat_template is 7, not text"),
    "template object": ("tokenizer_config.json", {"chat_template": {"a": 1}}, "chat_template is .*, not text"),
    "templates without names": ("tokenizer_config.json", {"chat_template": ["x"]}, "not a template or a list of"),
    "template without text": ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "not say template"),
    "bos 7": ("tokenizer_config.json", {"bos_token": 7}, "bos_token is 7, not text"),
    "bos object": ("tokenizer_config.json", {"bos_token": {"content": 7}}, "bos_token: content is 7, not text"),
    "add_bos text": ("tokenizer_config.json", {"bos_token": "a", "add_bos_token": "yes"}, "not true or false"),
    "eos text": ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is '2', not a token id or a list"),
    "eos far away": ("generation_config.json", {"eos_token_id": 10**12}, "is outside the vocabulary of 261 tokens"),
    "template not UTF-8": ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
}


@pytest.mark.parametrize(("name", "content", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_in_a_folder(tmp_path: Path, name: str, content: Any, message: str) -> None:
    for file, good in folder().items():
        (tmp_path / file).write_text(json.dumps(good))
    Tokenizer.from_folder(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(BadModel, match=message) as error:
        Tokenizer.from_folder(tmp_path)
    refusal(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(BadModel, match="is no file of at most 128 MiB"):
        Tokenizer.from_folder(tmp_path)


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for file, good in (folder() | {"tokenizer_config.json": {"chat_template": templates}}).items():
        (tmp_path / file).write_text(json.dumps(good))
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"


ESCAPES = "evil\x1b]0;pwned\x07\x1b[31mRED\nmodel    fake line\r\u202e"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.chat_template": ("u32", 7)}, "tokenizer.chat_template is 7, not text"),
        ({"tokenizer.ggml.bos_token_id": ("str", "x")}, "tokenizer.ggml.bos_token_id is 'x', not a whole number"),
        ({"general.architecture": ("str", ESCAPES)}, "is a evil"),
        (
            {"tokenizer.chat_template": ("str", "{{ raise_exception('" + ESCAPES + "') }}")},
            "refused the messages: evil",
        ),
    ],
)
def test_the_command_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, keys: Keys, message: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny_gguf.CHAT, keys=keys)
    assert main(["run", "--chat", "-p", "x", "-m", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.removesuffix("\n").isprintable()


def test_names_are_printed_without_escapes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny_gguf.CHAT, keys={"general.name": ("str", ESCAPES)})
    assert main(["inspect", str(path)]) == 0
    _, name, *others = capsys.readouterr().out.split("\n")
    assert "evil\ufffd]0;pwned" in name
    assert all(line.isprintable() for line in (name, *others))
