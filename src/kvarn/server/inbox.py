"""The inbox of a call: it receives updates of submissions from the engine's thread."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvarn.arrays import Floats
from kvarn.cache.adoption import Adoption
from kvarn.engine.explain import Explanation
from kvarn.jobs.job import TokenLogprob
from kvarn.server.timings import Progress, Timings


class AnswerPart(NamedTuple):
    """Text of one sample: the new text if the call streams, otherwise all text at the end."""

    sample: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    n_tokens: int  # of the sample so far
    ends: Sequence[int] = ()  # how long the text was after each token of the sample; the first n_tokens are of it
    tokens: Sequence[int] = ()  # of the sample; the first n_tokens are of it
    stop: str | None = None  # the stop text that ended it
    adoption: Adoption | None = None  # what the prompt reused
    timings: Timings | None = None  # so far, if the call asks for them


class Ended(NamedTuple):
    n_tokens: int  # of all samples
    explanation: Explanation
    error: BaseException | None
    finish_reasons: tuple[str, ...]  # of the samples
    first_token_at: float | None  # in seconds of time.perf_counter
    prompt_logprobs: list[TokenLogprob | None] | None = None  # if the call asks for them
    vector: Floats | None = None  # if the call asks for an embedding


News = AnswerPart | Progress | Ended
Update = News | Exception | None  # None: queued; an exception: refused


class Inbox:
    """Updates that the call has not taken yet. Used on the event loop only.

    Waiting parts of a sample are joined, so a slow client needs no more memory than its prompt and its answer."""

    def __init__(self, n_submissions: int) -> None:
        self._expected = n_submissions
        self._updates: dict[tuple[int, object], News] = {}
        self._arrived = asyncio.Event()
        self._refusal: Exception | None = None
        self._on_end: Callable[[int, Ended], None] | None = None

    def leave(self, on_end: Callable[[int, Ended], None]) -> None:
        """The client has disconnected. Pass the final update of each submission, past or future, to `on_end`."""
        self._on_end, left, self._updates = on_end, self._updates, {}
        for (which, _), update in left.items():
            if isinstance(update, Ended):
                on_end(which, update)

    def put(self, which: int, update: Update) -> None:
        """`which`: index of the submission in the call."""
        if self._on_end is not None:
            if isinstance(update, Ended):
                self._on_end(which, update)
            return
        if update is None:
            self._expected -= 1
        elif isinstance(update, Exception):
            self._refusal = update
        else:
            self._join((which, _key(update)), update)
        self._arrived.set()

    def _join(self, key: tuple[int, object], update: News) -> None:
        before = self._updates.get(key)
        if isinstance(before, AnswerPart) and isinstance(update, AnswerPart):
            text, logprobs = before.text + update.text, before.logprobs + update.logprobs
            update = update._replace(text=text, logprobs=logprobs)
        self._updates[key] = update

    async def accepted(self) -> None:
        """Return when all submissions are queued. Raise if one was refused."""
        while self._expected and self._refusal is None:
            await self._arrived.wait()
            self._arrived.clear()
        if self._refusal is not None:
            raise self._refusal
        if self._updates:
            self._arrived.set()

    async def take(self, seconds: float) -> list[tuple[int, News]]:
        """Nothing, if nothing comes in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        if self._refusal is not None:  # the engine has failed
            raise self._refusal
        taken, self._updates = [(which, update) for (which, _), update in self._updates.items()], {}
        return taken


def _key(update: News) -> object:
    """Updates of a submission with the same key are joined."""
    if isinstance(update, AnswerPart):
        return update.sample
    return update if isinstance(update, Progress) else "end"
