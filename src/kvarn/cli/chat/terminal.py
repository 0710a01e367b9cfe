"""The mode of the terminal during a chat, and its restoration on every way out.

Between two prompts, keys are not echoed and are not held back until Enter, so that what is typed during an
answer waits for the next prompt. Ctrl-C still interrupts, and does not discard what was typed. The old mode
comes back at the end of the block, also after an exception and after SIGTERM, SIGHUP and SIGQUIT, and while
the program is suspended (Ctrl-Z). Non-goal: kill -9.
"""

import os
import signal
import sys
import termios
from contextlib import suppress
from types import FrameType

_RESET = "\x1b[0m\x1b[?2004l\x1b[?25h"  # no style, no bracketed paste, a cursor
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class ChatMode:
    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "ChatMode":
        for number in _ENDING:
            self._handlers[number] = signal.signal(number, _leave)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._quiet()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._restore()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _quiet(self) -> None:
        mode = termios.tcgetattr(self._file)
        mode[0] &= ~termios.ICRNL  # Enter arrives as the prompt reads it
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        mode[3] |= termios.NOFLSH
        termios.tcsetattr(self._file, termios.TCSANOW, mode)

    def _restore(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)
            sys.stdout.write(_RESET)
            sys.stdout.flush()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._quiet()  # continued


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
