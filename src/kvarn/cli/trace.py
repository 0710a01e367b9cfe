"""Writes a trace of steps and operations for Perfetto or chrome://tracing, from the program's own timers."""

import json
from collections.abc import Sequence
from pathlib import Path

from kvarn.backends.base import Span
from kvarn.errors import KvarnError

STEP = "step"  # the name of the spans that are whole steps


def events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """In the trace-event format; times are microseconds from the first span."""
    zero = min((span.begin for span in spans), default=0)
    return [
        {
            "name": span.name,
            "ph": "X",
            "pid": 1,
            "tid": 1 if span.name == STEP else 2,
            "ts": (span.begin - zero) / 1000,
            "dur": (span.end - span.begin) / 1000,
            "args": span.facts,
        }
        for span in spans
    ]


def save(path: str, spans: Sequence[Span]) -> None:
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
        for thread, name in ((1, "steps"), (2, "operations"))
    ]
    try:
        Path(path).write_text(json.dumps({"traceEvents": names + events(spans)}), encoding="utf-8")
    except OSError as error:
        raise KvarnError(f"{path}: {error.strerror}") from None
