"""The lines that a user has typed, kept across runs: a file of JSON strings, one per line, oldest first.

The file is bounded, and only its owner can read it. Lines that cannot be read are skipped. If the file
cannot be written, `take_problem` says why, and the history lasts until the program ends.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from kvarn.loading.paths import cache_folder

MOST_LINES = 1000
MOST_BYTES = 1 << 20
LONGEST = 1 << 16  # bytes: a longer text is not kept


def history_file() -> Path:
    return cache_folder() / "chat_history"


class FileHistory(History):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._last = ""
        self._problem: str | None = None
        self._reported = False

    def take_problem(self) -> str | None:
        """Why the history is not kept. Only the first call says it."""
        if self._problem is None or self._reported:
            return None
        self._reported = True
        return self._problem

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        texts = self._read()
        self._last = texts[-1] if texts else ""
        return reversed(texts)

    def store_string(self, string: str) -> None:
        line = json.dumps(string).encode() + b"\n"
        if string == self._last or len(line) > LONGEST:
            return
        self._last = string
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._append(line)
        except OSError as error:
            self._problem = f"{error.filename or self._path}: {error.strerror or error}; the history is not kept"

    def _append(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(file, 0o600)  # the file may be older, or the umask stricter
            os.write(file, line)
        finally:
            os.close(file)

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - MOST_BYTES, 0))
                lines = file.read(MOST_BYTES).splitlines()
        except OSError:
            return []
        cut = size > MOST_BYTES
        texts = [text for line in lines[cut:] if (text := _text(line)) is not None]
        if cut or len(texts) > MOST_LINES:
            texts = texts[-MOST_LINES:]
            self._rewrite(texts[-MOST_LINES // 2 :])  # half, so that this happens rarely
        return texts

    def _rewrite(self, texts: list[str]) -> None:
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):  # it is only longer than it should be
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as writer:
                writer.write(b"".join(json.dumps(text).encode() + b"\n" for text in texts))
            os.replace(fresh, self._path)


def _text(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None
