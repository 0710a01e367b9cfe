"""Tables in terminals of any width, and the digits of JSON numbers."""

import io
import json
import math

import pytest

from kvarn.cli import table
from kvarn.cli.safe_text import safe
from kvarn.cli.table import print_json, print_table, tidy

HEADER = ("name", "one", "second", "third")
ROWS = [("alpha", "1", "22", "333"), ("b", "4444", "5", "6")]
WHOLE = """\
name    one  second  third
alpha     1      22    333
b      4444       5      6
"""
NARROW = """\
name    one  second
alpha     1      22
b      4444       5

name   third
alpha    333
b          6
"""
NARROWER = """\
name    one
alpha     1
b      4444

name   second
alpha      22
b           5

name   third
alpha    333
b          6
"""
FOLDED = """\
name
   one  second  third
alpha
     1      22    333
b
  4444       5      6
"""


@pytest.mark.parametrize(
    ("width", "text"),
    [(None, WHOLE), (200, WHOLE), (26, WHOLE), (25, NARROW), (19, NARROW), (18, NARROWER), (10, NARROWER), (9, FOLDED)],
)
def test_a_table_fits_the_terminal(width: int | None, text: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: width)
    print_table(HEADER, ROWS)
    assert capsys.readouterr().out == text


def test_columns_that_tell_rows_apart_are_repeated(capsys, monkeypatch) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: 20)
    print_table(HEADER, ROWS, key=2)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "one", "second"],
        ["alpha", "1", "22"],
        ["b", "4444", "5"],
        [],
        ["name", "one", "third"],
        ["alpha", "1", "333"],
        ["b", "4444", "6"],
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_is_that_of_the_terminal_only(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert table.terminal_width() is None, "pipes and files are not wrapped"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert table.terminal_width() == 77


NUMBERS = {  # key: what is given, what is printed
    "load_ms": (807.6106649999701, 807.611),
    "ms": (0.12345678, 0.123),
    "params": (0.12345678, 0.123457),
    "items": (0.12345678, 0.123457),
    "ms_per_step": (22.09214, 22.092),
    "seconds": (1.23456, 1.235),
    "tok_s": (69.8248, 69.82),
    "decode_tok_s": (0.00345678, 0.00346),
    "requests_per_second": (11.2345, 11.23),
    "bandwidth_share": (0.52163, 0.5216),
    "ppl": (117.3274912, 117.327),
    "max_difference": (9.467512345e-07, 9.46751e-07),
    "bytes_per_token": (96634368.25, 96634368.0),
    "rope_base": (1000000.0, 1000000.0),
    "when": (1763280000.123456, 1763280000.123456),
    "nothing": (0.0, 0.0),
    "not a number": (math.nan, None),
    "negative": (-3.14159265, -3.14159),
    "bytes": (1234567890123, 1234567890123),
    "yes": (True, True),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_digits(key: str) -> None:
    given, printed = NUMBERS[key]
    assert tidy({key: given}) == {key: printed}
    assert type(tidy({key: given})[key]) is type(printed)


def test_what_is_inside_has_the_digits_of_its_key() -> None:
    given = {"ttft_ms": {"mean": 1.23456}, "samples": [1.23456, 2.0], "rows": ({"tok_s": 1.23456, "ppl": 1.2345678},)}
    assert tidy(given) == {
        "ttft_ms": {"mean": 1.235},
        "samples": [1.23, 2.0],
        "rows": [{"tok_s": 1.23, "ppl": 1.23457}],
    }


HOSTILE = "\x1b\x7f\x9b\u061c\u200b\u200e\u200f\u202e\u2028\u2060\u2066\ufeff\U000e0041"


def test_json_cannot_control_a_terminal(monkeypatch) -> None:
    given = {"text": f"日本語 {HOSTILE} \U0001f600\n\t", "more": [1, 2]}
    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stdout", screen)
        print_json(given)
        shown = screen.getvalue()
        assert json.loads(shown) == given
        assert "日本語" in shown, "what can be read stays"
        assert any(c in shown for c in HOSTILE) is not screen.isatty(), "a file gets the text as it is"


def test_what_controls_or_hides_text_is_replaced() -> None:
    assert set(safe(HOSTILE)) == {"\N{REPLACEMENT CHARACTER}", "\n"}
    stays = "a\tb\n\u200c\u200d\ufe0f"  # joiners: Persian, emoji
    assert safe(stays) == stays
    assert safe("a\rb\r\n") == "ab\n"
