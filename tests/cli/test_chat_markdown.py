"""Answers on a terminal: blocks, the rows that are replaced, and what a hostile text may not do."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from kvarn.cli.chat import screen
from kvarn.cli.chat.blocks import Kind, Splitter
from kvarn.cli.chat.live import LiveRows, cells, wrap
from kvarn.cli.chat.markdown import BlockRenderer, console
from kvarn.cli.chat.screen import TerminalScreen
from kvarn.cli.safe_text import safe

ANSWER = """\
# A title
Some **bold** words and `code`, see [here](http://example.com/a).
A second line.

1. one is long enough that it must be wrapped at eighty columns, whatever the screen
2. two
   - nested

     ```python
     x = 1
     ```

- loose

- list
```python
def f(x):
    return x  # a comment that is so long that the terminal has to break the line of code

```
| name | value |
|------|------:|
| 日本語 | 22 |

> quoted

<think>shown</think> \\*
"""
SHOWN = """\
A title

Some bold words and code, see here (http://example.com/a).
A second line.

 1. one is long enough that it must be wrapped at eighty columns, whatever the
    screen
 2. two
     • nested
       ```python
       x = 1
       ```

 • loose

 • list

```python
def f(x):
    return x  # a comment that is so long that the terminal has to break the lin
e of code

```

name     value
──────────────
日本語      22

▌ quoted

<think>shown</think> *"""


class Display:
    """A screen of a terminal that an answer is written to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 80, lines: int = 24) -> None:
        self.size = os.terminal_size((columns, lines))
        self.raw = ""
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.Stream(self.screen)
        monkeypatch.setattr(screen, "write", self.write)
        monkeypatch.setattr(screen, "terminal_size", lambda: self.size)

    def write(self, text: str) -> None:
        self.raw += text
        self._stream.feed(text.replace("\n", "\r\n"))

    def resize(self, columns: int, lines: int) -> None:
        self.size = os.terminal_size((columns, lines))
        self.screen.resize(lines, columns)

    @property
    def text(self) -> str:
        above = ["".join(line[x].data for x in range(self.size.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip("\n")


def pieces(text: str, n: int) -> Iterator[str]:
    return (text[i : i + n] for i in range(0, len(text), n))


@pytest.mark.parametrize("n", [1, 2, 7, 50, 10_000])
def test_an_answer_looks_the_same_in_whatever_pieces_it_comes(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch)
    answer = TerminalScreen().answer()
    for piece in pieces(ANSWER, n):
        answer.add(piece)
    answer.end()
    assert display.text == SHOWN
    assert display.screen.cursor.x == 0, "the next output begins on a line of its own"


def test_the_block_that_is_being_written_is_plain_and_then_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch)
    answer = TerminalScreen().answer()
    answer.add("Some **bo")
    assert display.text == "Some **bo"
    answer.add("ld** words\n")
    assert display.text == "Some **bold** words"
    answer.add("\nnext")
    assert display.text == "Some bold words\n\nnext"
    assert display.screen.buffer[0][5].bold
    answer.end()
    assert display.text == "Some bold words\n\nnext"


def test_what_is_taller_than_the_screen_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch, 40, 5)
    answer = TerminalScreen().answer()
    tall = "\n".join(f"line **{i}**" for i in range(9))
    long = "words that are broken at a space and not in the middle"
    for piece in (*pieces(f"*before*\n\n{tall}\n{long}", 3), "\n\n", "*after*\n"):
        answer.add(piece)
    answer.end()
    broken = "words that are broken at a space and\nnot in the middle"
    assert display.text == f"before\n\n{tall}\n{broken}\n\nafter"


def test_a_resize_during_a_block_leaves_it_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch, 60, 10)
    answer = TerminalScreen().answer()
    answer.add("*before*\n\nsome *words* ")
    display.resize(30, 10)
    answer.add("and more\n\n")
    answer.add("*after*\n\n")
    answer.end()
    assert display.text == "before\n\nsome *words* and more\n\nafter"
    n_written = display.raw.count("before")
    assert n_written == 1, "nothing above the block was touched"


@pytest.mark.parametrize("columns", [1, 5, 12, 21, 33])
def test_narrow_screens_lose_no_text(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch, columns, 60)
    answer = TerminalScreen().answer()
    for piece in pieces(ANSWER, 3):
        answer.add(piece)
    answer.end()
    letters = "".join(display.text.split())
    for word in ("Atitle", "words", "whatever", "nested", "value", "quoted", "22", "comment"):
        assert word in letters, display.text


def test_an_interrupted_answer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch)
    answer = TerminalScreen().answer()
    answer.add("*one*\n\n*two")
    answer.end(interrupted=True)
    assert display.text == "one\n\n*two"
    assert display.screen.cursor.x == 0


HOSTILE = "\x1b[2Ja\x1b]0;title\x07b\x9b31mc\x00d\x08e\x7ff \u202eevil\u2066g\r\nh\ti \ufeffj\U000e0041"


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown = safe(HOSTILE)
    assert not [c for c in shown if c not in "\n\t" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)]
    assert not set("\u202e\u2066\ufeff\U000e0041\u2028") & set(shown)
    assert "\nh\ti" in shown
    assert "\r" not in shown
    kept = "日本語 👨\u200d👩\u200d👧 ❤\ufe0f e\u0301 \u00a0 שלום \U0001fae8 \U0003fffd"
    assert safe(kept) == kept
    assert safe("שלום\u200f! a\u200eb\u061cc\u200bd\u2060e") == "שלום! abcde", "left out: Hebrew has such marks, too"


@pytest.mark.parametrize("markdown", [True, False])
def test_hostile_answers_draw_only_what_we_draw(markdown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch)
    output = TerminalScreen(markdown)
    answer = output.answer()
    entities = '&#27;[31m &#x9b;31m &#x202e; [x](http://a/%1b[2J "\x1b") `\x1b[1m`\n\n'
    for text in (HOSTILE, "\n\n", entities, f"```\x1b[1m\n{HOSTILE}\n```\n", f"- {HOSTILE}\n", f"|{HOSTILE}|\n|-|\n"):
        answer.add(text)
    answer.end()
    output.note(HOSTILE)
    output.say(HOSTILE)
    ours = re.sub(r"\x1b\[[0-9;]*[mAJK]", "", display.raw)  # styles, up, clear
    assert not [c for c in ours if c not in "\n\t\r" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)]
    assert not set("\u202e\u2066") & set(ours)
    assert "\x1b[2J" not in display.raw
    assert "\x1b[31m" not in display.raw


TRICKY = {
    "deep lists": "\n".join("  " * i + "- x" for i in range(40)),
    "deep quotes": ">" * 200 + " x",
    "brackets": "[" * 500 + "](" * 200,
    "stars": "*a " * 300 + "**" * 200,
    "a wide table": "|".join(["a"] * 100) + "\n" + "|".join(["-"] * 100) + "\n",
    "an uneven table": "|a|b|\n|-|-|\n|1|2|3|4|\n|x|\n",
    "an unknown language": "```nosuch{x}\ncode\n```",
    "an open fence": "~~~~python\nx = '''\n",
    "an empty item": "-\n\n1.\n",
    "numbers": "999999999. x\n1000000000. y\n",
    "only spaces": "   \n \t \n",
}


@pytest.mark.parametrize("name", TRICKY)
@pytest.mark.parametrize("columns", [20, 80])
def test_odd_markdown_is_shown_and_raises_nothing(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(monkeypatch, columns, 24)
    answer = TerminalScreen().answer()
    for piece in pieces(TRICKY[name], 5):
        answer.add(piece)
    answer.end()
    assert set(re.findall(r"[a-z0-9]", TRICKY[name])) <= set(display.text), display.text


def test_no_colour() -> None:
    renderer, plain = BlockRenderer(console(False)), BlockRenderer(console(True))
    splitter = Splitter()
    blocks = splitter.feed(ANSWER) + splitter.end()
    colour = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|9[0-7])\b")
    assert any(colour.search(renderer.render(block, 80)) for block in blocks)
    shown = [plain.render(block, 80) for block in blocks]
    assert not any(colour.search(text) for text in shown)
    assert any("\x1b[1m" in text for text in shown)
    assert all(line == line.rstrip(" ") for text in shown for line in text.split("\n")), "no padding"


def test_blocks() -> None:
    splitter = Splitter()
    text = "# h\npara\n- one\n- two\n\n  more\n\nend\n```py\n\nx\n```\n---\n1) a\ntail"
    blocks = splitter.feed(text) + splitter.end()
    assert [(block.kind, block.text, block.gap) for block in blocks] == [
        (Kind.TEXT, "# h", False),
        (Kind.TEXT, "para", True),
        (Kind.ITEM, "- one", True),
        (Kind.ITEM, "- two\n\n  more", False),
        (Kind.TEXT, "end", True),
        (Kind.FENCE, "```py", True),
        (Kind.CODE, "", False),
        (Kind.CODE, "x", False),
        (Kind.FENCE, "```", False),
        (Kind.TEXT, "---", True),
        (Kind.ITEM, "1) a\ntail", True),
    ]


def test_rows_are_broken_at_spaces_and_never_wider_than_asked() -> None:
    text = "ab cde fghijklmnop 日本語日本語 x\n\n\ty ❤\ufe0f"
    for width in range(4, 30):
        rows = wrap(text, width)
        assert all(cells(row.rstrip(" ")) <= width and cells(row) <= width + 1 for row in rows)
        assert "".join("".join(rows).split()) == "".join(text.split())
    assert wrap("ab cde fg", 6) == ["ab cde ", "fg"]
    assert wrap("", 6) == [""]


@pytest.mark.parametrize("width", [8, 9, 17, 40])
def test_live_rows_show_what_was_added_in_whatever_pieces(width: int) -> None:
    text = "some words, 日本語の長い文章 and\na new line   with    spaces\n\nend"
    shown = []
    for n in (1, 3, 100):
        terminal = pyte.Screen(width, 40)
        stream = pyte.Stream(terminal)
        live = LiveRows(lambda: os.terminal_size((width, 40)))
        for piece in pieces(text, n):
            stream.feed(live.add(piece).replace("\n", "\r\n"))
        shown.append([line.rstrip() for line in terminal.display])
        assert live.removable
        stream.feed(live.remove())
        assert not "".join(terminal.display).strip()
        assert (terminal.cursor.x, terminal.cursor.y) == (0, 0)
    assert shown[0] == shown[1] == shown[2]


def test_other_commands_do_not_load_what_only_a_terminal_needs() -> None:
    source = Path(screen.__file__).parent
    for name in ("__init__", "session", "conversation", "commands", "plain", "saved", "multiline"):
        text = (source / f"{name}.py").read_text()
        assert not re.search(r"^(from|import) (rich|prompt_toolkit|markdown_it)", text, re.M)
