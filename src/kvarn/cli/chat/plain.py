"""Chat without a terminal: lines in, plain text out, no escape codes.

Standard output gets the answers and the results of commands, and nothing else. Notes go to standard error. Reasoning
is not shown.
On a terminal that cannot move its cursor (TERM=dumb) there is a prompt, and messages may have several lines.
"""

import sys
from io import TextIOWrapper

from kvarn.cli.chat.multiline import message, next_line
from kvarn.cli.safe_text import safe
from kvarn.jobs.job import Job

PROMPT, CONTINUED = "> ", ". "


class LineReader:
    def __init__(self) -> None:
        self._asks = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def read(self) -> str:
        try:
            return self._message() if self._asks else self._line().strip()
        except KeyboardInterrupt:
            if not self._asks:
                raise SystemExit(130) from None
            print(file=sys.stderr)
            raise
        except EOFError:
            if self._asks:
                print(file=sys.stderr)  # the shell's prompt begins on a line of its own
            raise

    def _message(self) -> str:
        text = self._line(PROMPT)
        while (begun := next_line(text)) is not None:
            text = begun + self._line(CONTINUED)
        return message(text)

    def keep(self) -> None:
        """The operating system keeps what is typed."""

    def _line(self, prompt: str = "") -> str:
        if prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class PlainAnswer:
    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def wait(self) -> None: ...

    def think(self, piece: str) -> None:
        """What reads a pipe wants the answer alone."""

    def add(self, piece: str) -> None:
        print(safe(piece) if self._is_terminal else piece, end="", flush=True)

    def end(self, interrupted: bool = False) -> None:
        print(flush=True)


class PlainScreen:
    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        print(safe(text) if self._is_terminal else text, flush=True)

    def note(self, text: str) -> None:
        print(safe(text), file=sys.stderr, flush=True)

    def statistics(self, text: str) -> None:
        if self._is_terminal and sys.stdin.isatty():
            self.note(f"[{text}]")

    def answer(self, job: Job | None = None) -> PlainAnswer:
        return PlainAnswer(self._is_terminal)
