"""Output to a terminal: answers as Markdown; dim notes, statistics and reasoning.

The block of an answer that is being written is shown as plain text, and replaced when it is complete. Text from
outside passes `safe` first. Non-goals: input; terminals that cannot move their cursor (plain.py).
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from kvarn.cli.cache_map import CLEAR, Below
from kvarn.cli.chat.blocks import Block, Splitter
from kvarn.cli.chat.live import LiveRows, terminal_size, wrap
from kvarn.cli.chat.markdown import BlockRenderer, console
from kvarn.cli.safe_text import safe
from kvarn.cli.thinking import Thinking, dim
from kvarn.jobs.job import Job

_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


class TerminalScreen:
    """`below`: draws the map of the cache below an answer, if it is wanted."""

    def __init__(self, markdown: bool = True, below: Callable[[Job], Below] | None = None) -> None:
        self._console = console(bool(os.environ.get("NO_COLOR"))) if markdown else None
        self._below = below

    def greet(self, name: str, lines: list[str]) -> None:
        write(f"{_BOLD}{safe(name)}{_NORMAL}\n")
        for line in lines:
            self.note(line)

    def say(self, text: str) -> None:
        write(_wrapped(text) + "\n")

    def note(self, text: str) -> None:
        write(f"{dim(_wrapped(text))}\n")

    def statistics(self, text: str) -> None:
        self.note(text)

    def answer(self, job: Job | None = None) -> "PlainAnswer | MarkdownAnswer | MappedAnswer":
        if self._below is None or job is None:
            return PlainAnswer() if self._console is None else MarkdownAnswer(self._console)
        plain = PlainAnswer(LiveRows(terminal_size).add)
        return MappedAnswer(plain if self._console is None else MarkdownAnswer(self._console), self._below(job))


class PlainAnswer:
    """`broken`: breaks its rows."""

    def __init__(self, broken: Callable[[str], str] = str) -> None:
        self._at_start = True  # of a line
        self._broken = broken
        self._thinking = Thinking(self._write)

    def wait(self) -> None: ...

    def _write(self, text: str) -> None:
        write(self._broken(text))

    def think(self, piece: str) -> None:
        self._thinking.add(piece)

    def add(self, piece: str) -> None:
        self._thinking.end()
        text = safe(piece)
        self._write(text)
        self._at_start = text.endswith("\n") if text else self._at_start

    def end(self, interrupted: bool = False) -> None:
        if not self._thinking.end(last=True):
            self._write("" if self._at_start else "\n")


class MappedAnswer:
    """An answer with the map of the cache below it."""

    def __init__(self, answer: "PlainAnswer | MarkdownAnswer", below: Below) -> None:
        self._answer = answer
        self._below = below

    def wait(self) -> None:
        write(self._below.draw())

    def think(self, piece: str) -> None:
        with _at_once():
            write(CLEAR)
            self._answer.think(piece)
            write(self._below.draw())

    def add(self, piece: str) -> None:
        with _at_once():
            write(CLEAR)
            self._answer.add(piece)
            write(self._below.draw())

    def end(self, interrupted: bool = False) -> None:
        with _at_once():
            write(CLEAR)
            self._answer.end(interrupted)
            write(self._below.leave())


class MarkdownAnswer:
    def __init__(self, console: Console) -> None:
        self._blocks = Splitter()
        self._renderer = BlockRenderer(console)
        self._live = LiveRows(terminal_size)
        self._thinks = False

    def wait(self) -> None: ...

    def think(self, piece: str) -> None:
        if not self._thinks:
            self._thinks = True
            self._complete()
            write("\n" if self._blocks.gap else "")
        write(dim(self._live.add(safe(piece))))

    def add(self, piece: str) -> None:
        if self._thinks:
            self._thinks = False
            write(self._live.leave() + "\n")
            self._blocks = Splitter()
        text = safe(piece)
        before = self._blocks.pending
        done = self._blocks.feed(text)
        if done:
            self._replace(done, text)
        else:
            self._grow(before)

    def end(self, interrupted: bool = False) -> None:
        """After an interrupt the rows on the screen may not be those that were counted, so they stay."""
        if interrupted or self._thinks:
            write(f"{_NORMAL}{self._live.leave()}")
        else:
            self._complete()

    def _complete(self) -> None:
        """Show what there is of the last block."""
        done = self._blocks.end()
        if done:
            self._replace(done, "")
        else:
            write(self._live.leave())

    def _grow(self, before: str) -> None:
        shown = self._blocks.pending[len(before) :]
        if before.strip():
            write(self._live.add(shown))
        elif shown.strip():  # the first text of the block
            write(self._live.add(("\n" if self._blocks.gap else "") + self._blocks.pending.lstrip("\n")))

    def _replace(self, done: list[Block], text: str) -> None:
        """Show complete blocks in place of the plain text. `text` is what came last."""
        pending = self._blocks.pending
        if self._live.removable:
            columns = terminal_size().columns
            shown = self._live.remove() + "".join(self._renderer.render(block, columns) for block in done)
            if pending.strip():
                shown += self._live.add(("\n" if self._blocks.gap else "") + pending)
            write(shown)
        elif pending.strip():  # plain text that is already shown goes on in the next block: that stays plain, too
            write(self._live.add(text))
        else:
            write(self._live.add(text.rstrip("\n")) + self._live.leave())


def _wrapped(text: str) -> str:
    return "\n".join(wrap(safe(text), max(terminal_size().columns - 1, 1)))


_held: list[str] = []  # what `_at_once` collects
_depth = 0


def write(text: str) -> None:
    """At once, so that a replacement does not flicker."""
    if _depth:
        _held.append(text)
    elif text:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _at_once() -> Iterator[None]:
    """All writes of the block are one, also if it is interrupted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        text = "".join(_held)
        _held.clear()
        write(text)
