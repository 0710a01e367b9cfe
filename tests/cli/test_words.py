"""Help that fits the terminal, other names of commands, and small outputs."""

from argparse import Namespace
from typing import Any

import pytest

from kvarn import __version__
from kvarn.cli import COMMANDS, bench, explain, help_text, main, parser_of, split_command
from kvarn.errors import KvarnError

FOUND: dict[str, Any] = {
    "id": "cmpl-1",
    "created": 0,
    "model": "a\x1b[2Jb",
    "prompt_tokens": 4,
    "reused_tokens": 1,
    "recomputed_tokens": 3,
    "recompute_ms": 1.0,
    "reuse_ended": {"reason": "evil \x9b2J \u202e", "at": 1},
    "recomputed_after_preemption": {},
    "preemptions": 0,
    "cancelled": False,
    "queued_ms": 1.0,
    "first_token_ms": None,
    "total_ms": 2.0,
}


@pytest.mark.parametrize("columns", [76, 80, 200])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in COMMANDS:
        if command != "help":
            prose = parser_of(command).format_help().split("\nexamples:\n")[0]
            assert max(map(len, prose.splitlines()[1:])) <= min(columns, 100), command
    prose = help_text().split("\ncommands:\n")[0]
    assert max(map(len, prose.splitlines())) <= min(columns, 100)


def test_paragraphs_use_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = parser_of("run").format_help()
    monkeypatch.setenv("COLUMNS", "100")
    wide = parser_of("run").format_help()
    narrow_text, wide_text = narrow.split("\n\n")[1], wide.split("\n\n")[1]
    assert narrow_text.split() == wide_text.split(), "the same words"
    assert max(map(len, narrow_text.splitlines())) <= 60 < max(map(len, wide_text.splitlines()))
    assert "\n  kvarn run model.gguf -f prompt.txt --cache paged --json\n" in narrow, "examples are not wrapped"


def test_other_names_of_commands(capsys: pytest.CaptureFixture) -> None:
    assert split_command(["ls", "--all"]) == ("list", ["--all"])
    assert split_command(["show", "x"]) == ("inspect", ["x"])
    assert split_command(["help", "ls"]) == ("list", ["--help"])
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"kvarn {__version__}\n"


def test_a_server_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "fetch", lambda args: FOUND)
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert "because    evil \N{REPLACEMENT CHARACTER}2J" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_no_request_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "request_json", lambda *asked, **named: {"data": []})
    for key, text in ((None, "no request has been made yet"), ("k", "this key has made no request yet")):
        with pytest.raises(KvarnError, match=text):
            explain.fetch(Namespace(id=None, url="http://127.0.0.1:1", api_key=key))


def test_one_measurement_has_no_spread() -> None:
    row = {"test": "pp8", "cache": "paged", "strategy": "paged", "cache_type": "bf16", "depth": 0, "batch": 1}
    row |= {"tok_s": 1.0, "spread": 0.0, "bytes_per_token": 1, "gb_s": 1.0, "bandwidth_share": 0.5}
    assert bench.line_of(row | {"samples": [1.0]})[6] == "-"
    assert bench.line_of(row | {"samples": [1.0, 1.0]})[6] == "0 %"
