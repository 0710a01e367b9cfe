"""The line that shows progress."""

import io
import os
import sys

import pytest

from kvarn.cli import progress
from kvarn.cli.progress import ProgressLine, amount

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 30 columns. (Not a fixture: pytest replaces the stream after those.)"""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda fd: os.terminal_size((30, 5)))
    return screen


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        *[(61_400_000, 98_362_432, " 61 of 98 MB"), (0, 98_362_432, " 0 of 98 MB"), (5_000_000, None, " 5 MB")],
        *[(38, 100, "  38 %"), (0, None, ""), (0, 0, "")],
    ],
)
def test_amounts(done: int, total: int | None, text: str) -> None:
    assert amount(done, total) == text


def test_a_line_is_cut_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_on(monkeypatch)
    with ProgressLine() as line:
        line("fetching a-very-long-name-of-a-model", 98_000_000, 98_000_000)
    assert screen.getvalue() == f"{ERASE}fetching a-very-l 98 of 98 MB{ERASE}"
    assert len("fetching a-very-l 98 of 98 MB") == 29, "the last column stays free"


def test_wide_signs_take_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_on(monkeypatch)
    ProgressLine()("\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 40)
    assert screen.getvalue() == ERASE + "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 14


def test_names_cannot_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_on(monkeypatch)
    with ProgressLine() as line:
        line("a\x1b]0;x\x07\nb")
        line.say("c\x1b[31m")
    assert screen.getvalue().replace(ERASE, "").count("\x1b") == 0
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().endswith(f"{ERASE}c\N{REPLACEMENT CHARACTER}[31m\n"), "what is said stays"


def test_a_terminal_without_codes_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_on(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with ProgressLine() as line:
        line("loading", 1, 1)
    assert screen.getvalue() == ""
