"""Request bodies: read with limits on size, time and memory, parsed, and computed with.

A parsed body can take thirty times its size, so large bodies are parsed one at a time, on a thread of their
own, and so are the token ids of their texts. They wait for each other before they are read: a budget limits
the bytes of large bodies in memory. Small bodies never wait. Some time after the last large body, free memory
goes back to the system, because the allocator keeps it otherwise.
"""

import asyncio
import ctypes
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from kvarn.server.refusal import Refusal

MOST_BYTES = 8 << 20  # of a body
LARGE = 1 << 16  # bytes; larger bodies are counted, and parsed on another thread
MOST_LARGE_BYTES = 4 * MOST_BYTES  # of all large bodies that are read or parsed at the same time
BODY_SECONDS = 30.0  # a client must send the body in this time
TRIM_SECONDS = 1.0  # after the last large body
Parsed = TypeVar("Parsed")
Result = TypeVar("Result")


class ByteBudget:
    """Bytes that may be used at the same time. Who does not fit waits, in order of arrival."""

    def __init__(self, most: int) -> None:
        self.used = 0
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, n: int) -> None:
        assert n <= self._most
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(n)
            self._admit()
            raise

    def give_back(self, n: int) -> None:
        self.used -= n
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self.used + self._waiting[0][0] <= self._most):
            n, turn = self._waiting.popleft()
            if not turn.done():  # done: cancelled
                self.used += n
                turn.set_result(None)

    def check(self) -> None:
        assert 0 <= self.used <= self._most


class Bodies:
    def __init__(self, seconds: float = BODY_SECONDS, budget: int = MOST_LARGE_BYTES) -> None:
        self.budget = ByteBudget(budget)
        self._seconds = seconds
        self._alone = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "kvarn-bodies")
        self._trimming: asyncio.TimerHandle | None = None

    async def process(
        self,
        request: Request,
        parse: Callable[[bytes], Parsed],
        compute: Callable[[Parsed], Result],
        threads: Callable[[Parsed], Executor | None] = lambda parsed: None,
    ) -> tuple[Parsed, Result]:
        """The parsed body, and what `compute` makes of it on one of `threads(parsed)` (None: asyncio's)."""
        loop = asyncio.get_running_loop()
        async with self._received(request) as (parts, large):
            if not large:
                parsed = parse(b"".join(parts))
                return parsed, await loop.run_in_executor(threads(parsed), compute, parsed)
            parsed = await loop.run_in_executor(self._thread, _parse, parse, parts)
            async with self._alone:
                return parsed, await loop.run_in_executor(threads(parsed), compute, parsed)

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[tuple[list[bytes], bool]]:
        """The parts of the body, and whether it is large. A large body is in the budget until the end of the block."""
        expected = _length(request)
        if expected > MOST_BYTES:
            raise _too_large()
        parts: list[bytes] = []
        size = taken = 0
        try:
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    async for part in request.stream():
                        parts.append(part)
                        size += len(part)
                        if size > MOST_BYTES:
                            raise _too_large()
                        if size > LARGE and not taken:
                            taken = await self._take(max(expected, size), limit)
            except TimeoutError:
                raise Refusal(408, f"the body did not arrive within {self._seconds:g} s") from None
            yield parts, bool(taken)
        finally:
            if taken:
                self.budget.give_back(taken)
                self._trim_later()

    async def _take(self, n: int, limit: asyncio.Timeout) -> int:
        """Wait until n bytes fit. The time of waiting is not the client's, so its limit is moved."""
        loop = asyncio.get_running_loop()
        left = (limit.when() or loop.time()) - loop.time()
        limit.reschedule(None)
        try:
            async with asyncio.timeout(self._seconds):
                await self.budget.take(n)
        except TimeoutError:
            raise Refusal(503, "too many large bodies at the same time: try again later", retry_after=1) from None
        limit.reschedule(loop.time() + left)
        return n

    def _trim_later(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(TRIM_SECONDS, loop.run_in_executor, self._thread, return_free_memory)


def return_free_memory() -> None:
    """Give memory that is free, but kept by the allocator, back to the system. Only glibc needs it and has it."""
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


MALLOC_TRIM = _malloc_trim()


def _parse(parse: Callable[[bytes], Parsed], parts: list[bytes]) -> Parsed:
    raw = b"".join(parts)
    parts.clear()
    return parse(raw)


def _length(request: Request) -> int:
    """Of the body; the most if it is not given."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else MOST_BYTES


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {MOST_BYTES} bytes")
