"""What the log says about each request: one entry, written when the request has ended.

An entry is filled where its facts are known, on the event loop only. It is written when nobody holds it any
longer: the connection holds it until the answer is sent, and a generation holds it until the engine has
reported the end, because a cancelled request ends there later. Without `log` nothing is written.
Non-goals: the form of lines (log_lines.py), writing them (log_writer.py).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from kvarn.server.inbox import Ended
from kvarn.server.log_lines import Facts, Log, now
from kvarn.server.refusal import Refusal
from kvarn.words import counted

POLLS = ("/health", "/ready", "/metrics")  # asked every few seconds
PAGE = ("/kvarn/page", "/kvarn/live", "/kvarn/cache/texts")  # asked by the page while it is open
CLOSED = 499  # the status of a request whose client left before an answer (nginx has the same)
ENTRY = "kvarn.entry"  # its place in the scope of a request


@dataclass(slots=True, eq=False)
class Entry:
    log: "RequestLog"
    id: str  # what the header x-request-id says
    client: str
    method: str
    path: str
    status: int = CLOSED
    key: str | None = None  # the first digits of the key's hash
    model: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # texts, only for --log-texts
    answers: dict[int, str] = field(default_factory=dict)
    first_token_at: float | None = None
    arrived: float = field(default_factory=time.perf_counter)
    sent: float | None = None  # when the answer was complete, or the client had gone
    holders: int = 1

    def refused(self, refusal: Refusal) -> None:
        self.error = self.error or refusal.logged  # the first one says more

    def ended(self, end: Ended) -> None:
        """One submission has ended."""
        self.prompt_tokens = (self.prompt_tokens or 0) + end.explanation.prompt
        self.cached_tokens = (self.cached_tokens or 0) + end.explanation.reused
        self.output_tokens = (self.output_tokens or 0) + end.n_tokens
        self.finish = list(dict.fromkeys([*self.finish, *end.finish_reasons]))
        times = [at for at in (self.first_token_at, end.first_token_at) if at is not None]
        self.first_token_at = min(times, default=None)
        if end.error is not None:
            self.error = f"{type(end.error).__name__}: {end.error}"

    @property
    def polls(self) -> bool:
        """Whether the request asks for no text and comes again and again."""
        return self.path.rstrip("/") in POLLS or self.path.startswith(PAGE)

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.log.write(self)

    def answered(self, index: int, text: str) -> None:
        """Text of a choice. It is kept only if the log may have texts."""
        if self.log.texts:
            self.answers[index] = self.answers.get(index, "") + text

    def facts(self) -> Facts:
        sent = time.perf_counter() if self.sent is None else self.sent
        first = None if self.first_token_at is None else _ms(self.first_token_at - self.arrived)
        return {
            "time": now(),
            "event": "request",
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "id": self.id,
            "key": self.key,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish": ",".join(self.finish) or None,
            "first_token_ms": first,
            "total_ms": _ms(sent - self.arrived),
            "error": self.error,
            "prompt": self.prompts or None,
            "answer": [self.answers[index] for index in sorted(self.answers)] or None,
        }


def entry_of(scope: Scope) -> Entry:
    entry: Entry = scope[ENTRY]
    return entry


class RequestLog:
    """`texts`: lines have the texts of prompts and answers. `polls`: also log polls that were answered with 200."""

    def __init__(self, log: Log | None = None, texts: bool = False, polls: bool = False) -> None:
        self.texts = texts and log is not None
        self._log = log
        self._polls = polls
        self._open: set[Entry] = set()
        self._started = time.monotonic()
        self._totals = dict.fromkeys(
            ("requests", "refused", "failed", "cancelled", "prompt_tokens", "cached_tokens", "output_tokens"), 0
        )

    def begin(self, id: str, client: str, method: str = "-", path: str = "-") -> Entry:
        entry = Entry(self, id, client, method, path)
        self._open.add(entry)
        return entry

    def write(self, entry: Entry) -> None:
        if entry not in self._open:
            return
        self._open.remove(entry)
        if entry.polls and entry.status < 400 and not self._polls:
            return
        self._count(entry)
        if self._log is not None:
            self._log.write(entry.facts())

    @property
    def n_open(self) -> int:
        """Requests under way, without polls."""
        return sum(not entry.polls for entry in self._open)

    def stopping(self, drain_seconds: float) -> None:
        n = self.n_open
        what = f"{counted(n, 'request')} may finish within {drain_seconds:g} s" if n else "no request is under way"
        self._say("stopping", f"stopping: {what}", open_requests=n)

    def stored(self, what: str) -> None:
        self._say("stored", what)

    def close(self) -> None:
        """The server has stopped: write what is left, and the totals."""
        for entry in list(self._open):
            self.write(entry)
        seconds, t = time.monotonic() - self._started, self._totals
        dropped = self._log.dropped if self._log is not None else 0
        self._say(
            "stopped",
            f"stopped after {seconds:.1f} s: {counted(t['requests'], 'request')} ({t['refused']:,} refused, "
            f"{t['failed']:,} failed, {t['cancelled']:,} cancelled), {counted(t['prompt_tokens'], 'prompt token')} "
            f"({t['cached_tokens']:,} cached), {counted(t['output_tokens'], 'output token')}"
            + (f"; {counted(dropped, 'log line')} dropped" if dropped else ""),
            seconds=round(seconds, 1),
            **t,
            dropped_lines=dropped,
        )

    def _say(self, event: str, message: str, **facts: Any) -> None:
        if self._log is not None:
            self._log.say(event, message, **facts)

    def _count(self, entry: Entry) -> None:
        t = self._totals
        t["requests"] += 1
        if entry.status == CLOSED or "cancelled" in entry.finish:
            t["cancelled"] += 1
        elif entry.status >= 500 or "error" in entry.finish:
            t["failed"] += 1
        elif entry.status >= 400:
            t["refused"] += 1
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            t[name] += getattr(entry, name) or 0


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
