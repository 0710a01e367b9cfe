"""The lines of the server's log, as text or as JSON. A line is always one line, whatever a client has sent.

Text lines of requests begin with time, client, method, path and status; the other facts follow as name=value.
A value with a space, a quote or a character that is not ASCII is written as a JSON string.
"""

import json
import logging
import re
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any

from kvarn.server.log_writer import LogWriter

LONGEST = 300  # characters of a value
LONGEST_TEXT = 4000  # of a prompt or an answer
TEXTS = ("prompt", "answer", "traceback")  # long values
PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and =
LEADING = ("time", "client", "method", "path", "status")

Facts = dict[str, Any]
Render = Callable[[Facts], str]


def as_json(facts: Facts) -> str:
    return _json({name: _bounded(name, value) for name, value in facts.items() if value is not None})


def as_text(facts: Facts) -> str:
    if "message" in facts:
        return f"{facts['time']} kvarn: {_json(_bounded('message', facts['message']))[1:-1]}"
    rest = {name: value for name, value in facts.items() if name not in (*LEADING, "event") and value is not None}
    shown = [_value("", facts[name]) for name in LEADING]
    return " ".join([*shown, *(f"{name}={_value(name, value)}" for name, value in rest.items())])


RENDERERS: dict[str, Render] = {"text": as_text, "json": as_json}


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


class Log:
    """Renders facts and passes the lines on."""

    def __init__(self, fd: int, form: str = "text") -> None:
        self._render = RENDERERS[form]
        self._writer = LogWriter(fd, lambda n: self._line("dropped", f"{n} lines of this log were dropped", lines=n))

    @property
    def dropped(self) -> int:
        return self._writer.dropped

    def write(self, facts: Facts) -> None:
        self._writer.put(self._render(facts))

    def say(self, event: str, message: str, **facts: Any) -> None:
        """A line about the server itself."""
        self._writer.put(self._line(event, message, **facts))

    def plain(self, text: str) -> None:
        """Lines as they are, for people."""
        for line in text.splitlines():
            self._writer.put(line)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _line(self, event: str, message: str, **facts: Any) -> str:
        return self._render({"time": now(), "event": event, "message": message, **facts})


class LogHandler(logging.Handler):
    """Python's logging, to the same lines. It never raises and never waits."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message, facts = record.getMessage(), {}
            if record.exc_info and record.exc_info[1] is not None:
                error = record.exc_info[1]
                message = f"{message}: {type(error).__name__}: {error}"
                facts["traceback"] = "".join(traceback.format_exception(error))[-LONGEST_TEXT:]
            self._log.say(record.levelname.lower(), message, **facts)
        except Exception:  # noqa: BLE001 (a message that cannot be made must not fail its caller)
            self.handleError(record)

    def flush(self) -> None:
        self._log.flush()


def _json(value: Any) -> str:
    """In ASCII, so no control character and no mark that reorders text is left."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def _bounded(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_bounded(name, each) for each in value[:8]]
    longest = LONGEST_TEXT if name in TEXTS else LONGEST
    if not isinstance(value, str) or len(value) <= longest:
        return value
    return f"{value[: longest // 2]} ... {value[-longest // 2 :]}"


def _value(name: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= LONGEST and PLAIN.fullmatch(value):
        return value
    return _json(_bounded(name, value)) if isinstance(value, str | list) else str(value)
