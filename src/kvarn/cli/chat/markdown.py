"""A block of Markdown as text with escape codes, for a terminal.

The block is text from outside: every character that reaches the terminal passes `safe`, also those that Markdown
makes from entities. Nothing is left out: what is not understood is shown as it is. Lines have no padding and
code has no frame, so that both can be copied. Non-goals: splitting an answer into blocks; images and HTML.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from html import unescape

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, ListItem, Markdown, TableElement
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from kvarn.cli.chat.blocks import Block, Kind
from kvarn.cli.safe_text import safe

_THEME = Theme(  # the 16 colours of the terminal itself, readable on light and on dark
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold",
        "markdown.code": "cyan",
        "markdown.code_block": "none",
        "markdown.block_quote": "italic",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.hr": "dim",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
_CODE_COLOURS = "ansi_dark"
_CONTEXT = 40  # lines of code that decide the colours of the last one; all are read again for each line
_NARROWEST = 20  # columns
_NUMBER = re.compile(r"^\s*\d{1,9}[.)]", re.M)
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_COLUMN = 6  # columns of the terminal that a column of a table needs


class BlockRenderer:
    """Renders the blocks of one answer in order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._code: list[str] = []

    def render(self, block: Block, columns: int) -> str:
        """The block with a line end. The lines fit into `columns`, except those of code: the terminal breaks them."""
        gap = "\n" if block.gap else ""
        if block.kind is Kind.FENCE:
            self._code = []
            return gap + self._text(Text(block.text, style="dim"), columns) + "\n"
        if block.kind is Kind.CODE:
            self._code = [*self._code[1 - _CONTEXT :], block.text]
            return self._text(self._last_line(block.language), columns) + "\n"
        if columns < _NARROWEST or not block.text.strip():
            return gap + safe(block.text) + "\n"
        try:
            shown = self._text(Answer(block.text), columns)
        except Exception:  # noqa: BLE001 (a text can make any part of the renderer fail, and must be shown)
            shown = ""
        return gap + (shown if _has_all(shown, block.text) else safe(block.text)) + "\n"

    def _last_line(self, language: str) -> Text:
        highlighted = _syntax(language).highlight("\n".join(self._code).expandtabs(4))
        return highlighted.split("\n", allow_blank=True)[len(self._code) - 1]

    def _text(self, renderable: RenderableType, columns: int) -> str:
        options = self._console.options.update(width=columns, no_wrap=isinstance(renderable, Text), overflow="fold")
        if isinstance(renderable, Text):
            options = options.update(width=max(renderable.cell_len, 1))
        lines = list(Segment.split_lines(_safe(self._console.render(renderable, options))))
        while lines and _is_blank(lines[0]):
            lines.pop(0)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        with self._console.capture() as captured:
            for i, line in enumerate(lines):
                shown = [*_without_padding(line), *([Segment.line()] if i + 1 < len(lines) else [])]
                self._console.print(Segments(shown), end="", soft_wrap=True)
        return captured.get()


class _Code(CodeBlock):
    """Code inside a list or a quote."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = _syntax(self.lexer_name).highlight(str(self.text).rstrip().expandtabs(4))
        code.rstrip()
        code.overflow = "fold"
        yield Text(f"```{'' if self.lexer_name == 'text' else self.lexer_name}", style="dim")
        yield code
        yield Text("```", style="dim")


class _Heading(Heading):
    """Left and without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Item(ListItem):
    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        label = f" {number}. "
        lines = console.render_lines(self.elements, options.update(width=options.max_width - len(label)))
        style = console.get_style("markdown.item.number")
        for i, line in enumerate(lines):
            yield Segment(" " * len(label) if i else label, style)
            yield from line
            yield Segment.line()


class _Table(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, style="markdown.table.border")
        header = self.header.row.cells if self.header and self.header.row else []
        if len(header) * _COLUMN > options.max_width:
            raise ValueError("the table is too wide")
        for cell in header:
            heading = cell.content.copy()
            heading.stylize("markdown.table.header")
            table.add_column(heading, overflow="fold", justify=cell.justify)
        for row in self.body.rows if self.body else []:
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class Answer(Markdown):
    """Rich's Markdown without what loses text: HTML and link definitions are shown, line ends are kept."""

    elements = Markdown.elements | {
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "list_item_open": _Item,
        "table_open": _Table,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self.parsed = parser.disable(["image", "reference"]).parse(text)
        _keep_line_ends(self.parsed)


def _keep_line_ends(tokens: Iterable[Token]) -> None:
    # A model ends a line where it wants one; only people wrap paragraphs.
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_line_ends(token.children or ())


@lru_cache
def _syntax(language: str) -> Syntax:
    return Syntax("", language or "text", theme=_CODE_COLOURS, background_color="default")


def _safe(segments: Iterable[Segment]) -> Iterable[Segment]:
    """Only text and styles pass."""
    for text, style, control in segments:
        if not control:
            yield Segment(safe(text), style)


def _has_all(shown: str, source: str) -> bool:
    """Whether every letter and digit of the source is shown. Parsers leave out the cells of an uneven table, and what
    is nested too deeply. Numbers of items may change."""
    text, wanted = _STYLE.sub("", shown), _NUMBER.sub("", unescape(safe(source)))
    return bool(text.strip()) and not Counter(filter(str.isalnum, wanted)) - Counter(filter(str.isalnum, text))


def _is_blank(line: list[Segment]) -> bool:
    return not any(segment.text.strip() for segment in line)


def _without_padding(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip(" "):
        line = line[:-1]
    if line:
        text, style, _ = line[-1]
        line = [*line[:-1], Segment(text.rstrip(" "), style)]
    return line


def console(no_colour: bool) -> Console:
    return Console(theme=_THEME, force_terminal=True, no_color=no_colour, highlight=False, markup=False, emoji=False)
