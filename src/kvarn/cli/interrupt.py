"""Ctrl-C in a command: the first one is an ordinary KeyboardInterrupt, the second one ends the process.

Python delivers an interrupt only between two of its own instructions, so one step of a large model delays
it by seconds. The second Ctrl-C is therefore seen by a thread, through the file descriptor that Python's
signal handler writes to. While modules are imported, the first Ctrl-C ends the process, because packages
turn a KeyboardInterrupt into errors of their own. Non-goals: `chat`, `serve` and `bench serve`, which
handle interrupts themselves.
"""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import NoReturn

STATUS = 128 + signal.SIGINT


class Interrupted(Exception):
    """Ctrl-C, after which the command has said what it had to say. The exit status is STATUS."""


class Failed(Exception):
    """The command has already said what went wrong. The exit status is 1."""


def end_line() -> None:
    """After Ctrl-C the cursor of a terminal is behind `^C`: begin a new line."""
    with suppress(OSError):
        if sys.stderr.isatty() or sys.stdout.isatty():
            print(file=sys.stderr, flush=True)


class FirstInterruptEnds:
    """In this block Ctrl-C ends the process at once. An own handler of the program stays in place."""

    def __enter__(self) -> "FirstInterruptEnds":
        self._active = signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_main_thread()
        if self._active:
            signal.signal(signal.SIGINT, lambda number, frame: _end())
        return self

    def __exit__(self, *error: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class SecondInterruptEnds:
    """In this block the second Ctrl-C ends the process at once. Only the main thread gets interrupts; elsewhere the
    block has no effect."""

    def __enter__(self) -> "SecondInterruptEnds":
        self._active = _is_main_thread()
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._watcher = threading.Thread(target=self._watch, name="second-interrupt", daemon=True)
            self._watcher.start()
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._active:
            signal.set_wakeup_fd(self._before)
            self._writer.close()  # ends the watcher
            self._watcher.join()
            self._reader.close()

    def _watch(self) -> None:
        n_interrupts = 0
        while signals := self._reader.recv(64):  # one byte for each signal, its number
            n_interrupts += signals.count(signal.SIGINT)
            if n_interrupts >= 2:
                _end()


def _end() -> NoReturn:
    end_line()
    os._exit(STATUS)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
