"""Reads an answer as it comes: reasoning, text, tool calls.

Contract: the joined deltas (deltas.py) do not depend on how the text was cut into pieces. The time is in proportion to
the text's length. Besides the call that is being read, only what may be the beginning of a marker is held back.

A call that cannot be read is `Malformed`: all its text, up to its end marker, with an error. Its begin may already have
been sent; then it ends with `CallEnd(complete=False)`. White space is dropped where it touches a call or reasoning.
Without tools, only reasoning is looked for. Control tokens must be in the text: they are markers.
Non-goal: values are not checked against a tool's schema.
"""

from collections.abc import Sequence

from kvarn.dialect.answer import Answer
from kvarn.dialect.deltas import Delta
from kvarn.dialect.dialect import Dialect, NewId, Tool
from kvarn.dialect.harmony import Harmony
from kvarn.dialect.source import Source


class Parser:
    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool],
        prompt_opens_reasoning: bool = False,
        new_id: NewId | None = None,
    ) -> None:
        """`new_id` makes the ids of calls; without it they are random."""
        self._source = Source()
        self._deltas: list[Delta] = []
        parts = dialect, tools, self._source, self._deltas.append, new_id or dialect.new_id
        harmony = dialect.form == "harmony"
        self._steps = Harmony(*parts).answer() if harmony else Answer(*parts).read(prompt_opens_reasoning)
        self._done = False

    def push(self, text: str) -> list[Delta]:
        self._source.add(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """The answer has ended. More calls return nothing."""
        self._source.ended = True
        return self._advance()

    @property
    def work(self) -> int:
        """Characters that were copied so far: a measure of the time."""
        return self._source.copied

    def _advance(self) -> list[Delta]:
        if not self._done:
            self._done = next(self._steps, self) is self
        deltas = self._deltas[:]
        self._deltas.clear()
        return deltas
