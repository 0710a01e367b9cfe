"""What the engine's thread tells about an order, and where a call finds it: on the event loop, joined as it waits."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvarn.engine.explain import Explanation
from kvarn.jobs.job import TokenLogprob


class Answered(NamedTuple):
    """One sample, as far as it is known: with stream what is new, otherwise all of it at the end."""

    sample: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class Ended(NamedTuple):
    n_tokens: int  # of all samples
    explanation: Explanation
    error: BaseException | None


Update = Answered | Ended | Exception | None  # None: accepted; an error: refused


class Inbox:
    """What a call has not taken yet of the updates on its orders; it lives on the event loop. Pieces of a sample are
    joined while they wait, so a caller who reads slowly costs no more than the answer itself."""

    def __init__(self, n_orders: int) -> None:
        self._expected = n_orders
        self._updates: dict[tuple[int, object], Answered | Ended] = {}
        self._arrived = asyncio.Event()
        self._refusal: Exception | None = None
        self._heir: Callable[[int, Ended], None] | None = None

    def leave(self, heir: Callable[[int, Ended], None]) -> None:
        """Nobody takes any more; what is or will be told of an order's end goes to the heir."""
        self._heir, left, self._updates = heir, self._updates, {}
        for (which, _), update in left.items():
            if isinstance(update, Ended):
                heir(which, update)

    def put(self, which: int, update: Update) -> None:
        """`which` of the call's orders this is about."""
        if self._heir is not None:
            if isinstance(update, Ended):
                self._heir(which, update)
            return
        if update is None:
            self._expected -= 1
        elif isinstance(update, Exception):
            self._refusal = update
        else:
            self._join((which, update.sample if isinstance(update, Answered) else "end"), update)
        self._arrived.set()

    def _join(self, key: tuple[int, object], update: Answered | Ended) -> None:
        before = self._updates.get(key)
        if isinstance(before, Answered) and isinstance(update, Answered):
            text, logprobs = before.text + update.text, before.logprobs + update.logprobs
            update = Answered(before.sample, text, logprobs, update.finish_reason)
        self._updates[key] = update

    async def accepted(self) -> None:
        """Return once all orders are queued; raise when one was refused."""
        while self._expected and self._refusal is None:
            await self._arrived.wait()
            self._arrived.clear()
        if self._refusal is not None:
            raise self._refusal
        if self._updates:
            self._arrived.set()

    async def take(self) -> list[tuple[int, Answered | Ended]]:
        await self._arrived.wait()
        self._arrived.clear()
        if self._refusal is not None:  # the engine has failed meanwhile
            raise self._refusal
        taken, self._updates = [(which, update) for (which, _), update in self._updates.items()], {}
        return taken
