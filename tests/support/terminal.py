"""A program in a pseudo-terminal, as a person sees it: what is on the screen, and keys that are typed.

Everything waits for text on the screen, never for time. A wait that lasts longer than a minute fails and shows
the screen.
"""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pyte
from support.serving import MAIN

ENTER, ESCAPE, TAB = "\r", "\x1b", "\t"
UP = "\x1b[A"
CTRL_C, CTRL_D, CTRL_R, CTRL_Z = "\x03", "\x04", "\x12", "\x1a"
SECONDS = 60


def pasted(text: str) -> str:
    """As a terminal sends a paste to a program that asked for brackets."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    def __init__(self, process: subprocess.Popen, master: int, slave: int, columns: int, lines: int) -> None:
        self.process = process
        self.raw = b""  # everything that was written
        self.slave = slave
        self._master = master
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def text(self) -> str:
        """All lines, also those that have left the screen at the top."""
        above = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        lines = [line.rstrip() for line in [*above, *self._screen.display]]
        return "\n".join(lines).rstrip("\n")

    @property
    def line_of_cursor(self) -> str:
        return self._screen.display[self._screen.cursor.y].rstrip()

    def wait_for(self, text: str, n: int = 1) -> str:
        """Wait until the text has been shown n times."""
        return self.until(lambda shown: shown.count(text) >= n, f"{text!r} {n} times")

    def until(self, reached: Callable[[str], bool], what: str) -> str:
        end = time.monotonic() + SECONDS
        while not reached(self.text):
            left = end - time.monotonic()
            assert left > 0, f"the screen does not show {what}:\n{self.text}"
            assert self._read(left), f"the program ended and did not show {what}:\n{self.text}"
        return self.text

    def until_stopped(self) -> None:
        """Wait until the program is suspended. What it writes meanwhile is shown."""
        end = time.monotonic() + SECONDS
        what = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.process.pid, what) is None:
            left = end - time.monotonic()
            assert left > 0, f"the program is not suspended:\n{self.text}"
            assert self._read(left), f"the program ended:\n{self.text}"

    def at_prompt(self, n: int = 1) -> str:
        """Wait until the last line is an empty prompt, and there are n prompts."""
        return self.until(
            lambda shown: shown.split("\n")[-1].rstrip() == ">" and sum(x[:1] == ">" for x in shown.split("\n")) >= n,
            f"{n} prompts",
        )

    def say(self, text: str) -> str:
        """Type a line at the prompt. What is shown until the next prompt."""
        n = sum(line[:1] == ">" for line in self.text.split("\n"))
        before = len(self.text)
        self.type(text + ENTER)
        return self.at_prompt(n + 1)[before:]

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        set_size(self._master, columns, lines)

    def leave(self) -> int:
        """Wait for the end of the program."""
        end = time.monotonic() + SECONDS
        while self._read(end - time.monotonic()):
            assert time.monotonic() < end, f"the program does not end:\n{self.text}"
        return self.process.wait(timeout=SECONDS)

    @property
    def echoes(self) -> bool:
        """Whether the terminal is in the mode that a shell needs: echo, and lines."""
        flags = termios.tcgetattr(self.slave)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def _read(self, timeout: float) -> bool:
        """Read what there is. False if the program has ended and all is read."""
        ended = self.process.poll() is not None
        ready, _, _ = select.select([self._master], [], [], 0 if ended else min(timeout, 0.05))
        if ready:
            data = os.read(self._master, 65536)
            self.raw += data
            self._stream.feed(data)
        return bool(ready) or not ended


def set_size(file: int, columns: int, lines: int) -> None:
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextlib.contextmanager
def terminal(arguments: Sequence[str], columns: int = 80, lines: int = 24, **environment: str) -> Iterator[Terminal]:
    """`kvarn` with these arguments in a terminal of its own."""
    master, slave = pty.openpty()
    set_size(slave, columns, lines)
    surroundings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=surroundings | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        try:
            yield Terminal(process, master, slave, columns, lines)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(master)
        os.close(slave)
