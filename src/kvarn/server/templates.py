"""Renders chat templates in a child process with limits on time and memory.

A template comes with a model file and is not trusted: it may loop for ever or ask for gigabytes. In a
child it cannot hold the server's threads, lock or memory. The child ends itself when a template takes
too long, also if the server is gone. The next call starts a new one.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from threading import Lock
from typing import IO, Any

from kvarn.errors import KvarnError
from kvarn.text.chat import ChatTemplate

SECONDS = 5.0  # of processor time for one conversation; templates of published models take milliseconds
BYTES = 1 << 30  # of address space, beyond what the child has when it starts
Child = subprocess.Popen[bytes]
MOST_TEXT = 64 << 20  # bytes of a rendered conversation; requests have at most 8 MiB


class TemplateProcess:
    """The same calls as ChatTemplate. Any thread may call; calls run one at a time."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = SECONDS) -> None:
        self._arguments = [source, bos_token, eos_token, seconds]
        self._seconds = seconds
        self._child: Child | None = None
        self._lock = Lock()
        self._closed = False

    def start(self) -> None:
        """Start the child now, and not with the first call."""
        with self._lock:
            self._running()

    def render(self, messages: Any, /, **variables: Any) -> str:
        with self._lock:
            child = self._running()
            try:
                _write(_pipe(child.stdin), [messages, variables])
                text, error = _read(_pipe(child.stdout), MOST_TEXT)
            except (OSError, EOFError, struct.error):
                raise KvarnError(self._why_it_ended(child)) from None
            except BaseException:  # its next answer would be the one to this call
                self._end(child)
                raise
        if error is not None:
            raise KvarnError(error)
        return str(text)

    def close(self) -> None:
        """End the child, and with it the call under way. Later calls raise an error."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:  # the call under way ends with the child
            if self._child is not None:
                self._end(self._child)

    def _running(self) -> Child:
        if self._closed:
            raise KvarnError("the server is stopping")
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvarn.server.templates"],  # -P: no modules of the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for the server
            )
            _write(_pipe(self._child.stdin), self._arguments)
        return self._child

    def _why_it_ended(self, child: Child) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)  # its pipe is closed before it has ended
        self._end(child)
        if child.returncode == -signal.SIGPROF:
            return f"the chat template took more than {self._seconds:g} s on these messages: use another model"
        return "the chat template ended its process on these messages: use another model"

    def _end(self, child: Child) -> None:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                _pipe(pipe).close()
        self._child = None


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _write(pipe: IO[bytes], value: Any) -> None:
    raw = json.dumps(value).encode()
    pipe.write(struct.pack("<Q", len(raw)) + raw)
    pipe.flush()


def _read(pipe: IO[bytes], most: int) -> Any:
    (length,) = struct.unpack("<Q", pipe.read(8))
    if length > most:
        raise KvarnError(f"the chat template wrote {length} bytes; the limit is {most}")
    raw = pipe.read(length)
    if len(raw) < length:
        raise EOFError
    return json.loads(raw)


# -- in the child ----------------------------------------------------------------------------------------------------


def _main() -> None:
    reading, writing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    source, bos_token, eos_token, seconds = _read(reading, sys.maxsize)
    _limit_memory()
    while True:
        messages, variables = _read(reading, sys.maxsize)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        text, problem = None, None
        try:
            text = ChatTemplate(source, bos_token, eos_token).render(messages, **variables)
        except KvarnError as error:
            problem = str(error)
        except MemoryError:
            problem = f"the chat template needs more than {BYTES >> 20} MiB on these messages: use another model"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(writing, [text, problem])


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, struct.error, BrokenPipeError):  # the server is gone
        _main()
