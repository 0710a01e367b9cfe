"""Writes lines to a file descriptor from a thread of its own, so that nobody who logs ever waits.

Lines wait in a queue while the reader of a pipe is slow. If the queue is full, or the other end is closed,
lines are dropped and counted. The next line that can be written is preceded by one that says how many were
dropped. Non-goal: what a line says (log_lines.py).
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST_LINES = 1024  # in the queue


class LogWriter:
    """`notice(n)`: the line that says that n lines were dropped."""

    def __init__(self, fd: int, notice: Callable[[int], str], most: int = MOST_LINES) -> None:
        self.dropped = 0
        self._fd = os.dup(fd)
        self._notice = notice
        self._most = most
        self._reported = 0  # of the dropped lines
        self._lines: deque[str] = deque()
        self._busy = False  # a line is being written
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvarn-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line, without its line end. Never waits for the file, and never raises."""
        with self._changed:
            if self._closing or len(self._lines) >= self._most:
                self.dropped += 1
            else:
                self._lines.append(line)
                self._changed.notify_all()

    def flush(self, seconds: float = 2.0) -> None:
        """Wait until all lines are written, but not longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._busy, seconds)

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, and end the thread. If the other end does not read, the thread ends with the process."""
        self.flush(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds if not self._busy else 0)
        if not self._thread.is_alive():
            os.close(self._fd)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                line, self._busy = self._lines.popleft(), True
                missing = self.dropped - self._reported
            if missing and self._write(self._notice(missing)):
                self._reported += missing
            if not self._write(line):
                with self._changed:
                    self.dropped += 1

    def _write(self, line: str) -> bool:
        rest = line.encode("utf-8", "replace") + b"\n"
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another program has made this terminal or pipe non-blocking
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll()
            except OSError:
                return False
        return True
