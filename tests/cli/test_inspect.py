"""`kvarn inspect` as a person reads it: both names, no repeated columns or rows, and 80 columns are enough."""

import itertools
import json
from pathlib import Path

import pytest
from support import dialect_templates
from support.tiny_gguf import write

from kvarn.cache.strategy import STRATEGIES
from kvarn.cli import main

WINDOWED = [name for name, strategy in STRATEGIES.items() if strategy.windowed]


def inspected(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    assert main(["inspect", *words]) == 0
    return capsys.readouterr().out.splitlines()


def strategies_of(lines: list[str]) -> list[str]:
    header = next(i for i, line in enumerate(lines) if line.startswith("bytes per token"))
    rows = itertools.takewhile(str.strip, lines[header + 1 :])
    return [line.split()[0] for line in rows]


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write(Path("given.gguf"), "llama").name


def test_both_names(plain: str, capsys: pytest.CaptureFixture) -> None:
    lines = inspected(capsys, plain)
    assert lines[0].split() == ["model", "given.gguf"]
    assert lines[1].startswith("name in the file ")
    assert "rope base        10,000" in lines
    assert max(map(len, lines)) <= 80


def test_rows_that_would_repeat_are_left_out(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = inspected(capsys, plain)
    assert not set(strategies_of(lines)) & set(WINDOWED)
    assert "ring, sliding and sinks are left out: this model has no window." in lines
    for given in ((plain, "--window", "16"), (str(write(tmp_path / "windows.gguf", "gemma3")),)):
        lines = inspected(capsys, *given)
        assert strategies_of(lines) == list(STRATEGIES)
        assert not any("left out" in line for line in lines)
    facts = json.loads("\n".join(inspected(capsys, plain, "--json")))
    assert {row["strategy"] for row in facts["kv_cache"]} == set(STRATEGIES), "JSON has them all"


def test_equal_columns_are_one(plain: str, capsys: pytest.CaptureFixture) -> None:
    lines = inspected(capsys, plain)
    for title in ("bytes per token", "total"):
        header = next(line for line in lines if line.startswith(title))
        found = [text.strip() for text in header.split("  ") if text.strip()]
        assert found == [title, "f32", "f16, bf16", "int8", "int6", "int4"]


def test_how_it_writes_calls(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    hermes = str(write(tmp_path / "hermes.gguf", "llama", chat_template=dialect_templates.HERMES))
    lines = inspected(capsys, hermes)
    assert "tool calls       hermes, json (from its template)" in lines
    assert "reasoning        <think> ... </think>" in lines
    facts = json.loads("\n".join(inspected(capsys, hermes, "--json")))["dialect"]
    assert (facts["origin"], facts["call_begin"], facts["parallel"]) == ("derived", "<tool_call>\n", True)
    assert facts["reasoning"] == ["<think>\n", "\n</think>\n\n"]


def test_a_model_without_tools_or_without_a_template(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    chat = str(write(tmp_path / "chat.gguf", "llama", chat_template="{{ messages[0].content }}"))
    assert "tool calls       generic, json (by instructions; it has no format)" in inspected(capsys, chat)
    assert "tool calls       unknown: no chat template can be read" in inspected(capsys, plain)
    assert "dialect" not in json.loads("\n".join(inspected(capsys, plain, "--json")))
    broken = str(write(tmp_path / "broken.gguf", "llama", chat_template="{% if %}"))
    assert json.loads("\n".join(inspected(capsys, broken, "--json")))["dialect"]["origin"] == "generic"
