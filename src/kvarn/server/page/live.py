"""GET /kvarn/live: the cache and the requests as they change, one line of JSON at a time.

The first line has everything, each further one what changed since the one before (state.py), at most four times
a second. A watcher that reads slowly gets fewer lines, not older ones. While nobody watches, nothing is looked at
and no task runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarn.server.access import Caller
from kvarn.server.call import until_disconnected
from kvarn.server.page.lanes import Lane
from kvarn.server.page.observer import Observation, Observer
from kvarn.server.page.state import State
from kvarn.server.refusal import Refusal
from kvarn.server.worker import Worker

log = logging.getLogger("kvarn")

PERIOD = 0.25  # seconds between two looks
MOST_WATCHERS = 20
QUIET = 2.0  # after so many seconds without a change an empty line is sent: only a send shows who has gone
MEDIA_TYPE = "application/x-ndjson"


class Watcher:
    def __init__(self) -> None:
        self.changed = asyncio.Event()


class Live:
    """Used on the event loop. `pause` waits between two looks."""

    def __init__(
        self,
        worker: Worker,
        state: State,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._worker = worker
        self._state = state
        self._observer = Observer(worker)
        self._pause = pause
        self._watchers: set[Watcher] = set()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self.n_looks = 0

    def enter(self) -> Watcher:
        """A place among the watchers. Who has one must `leave`."""
        if self._closed:
            raise Refusal(503, "the server is stopping")
        if len(self._watchers) >= MOST_WATCHERS:
            message = f"{MOST_WATCHERS} clients watch this server, and no more can: close a page that is not needed"
            raise Refusal(429, message, retry_after=5)
        watcher = Watcher()
        self._watchers.add(watcher)
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look_on())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End all streams: the server is stopping."""
        self._closed = True
        self._tell()

    async def lines(self, watcher: Watcher, caller: Caller, past: Callable[[], Sequence[Lane]]) -> AsyncIterator[bytes]:
        tick = None
        while not self._closed:
            if self._state.seen and tick != self._state.tick:
                line = self._state.frame(tick, caller, past() if tick is None else ())
                tick = self._state.tick
                yield line
                continue
            watcher.changed.clear()
            try:
                async with asyncio.timeout(QUIET):
                    await watcher.changed.wait()
            except TimeoutError:
                yield b"\n"

    async def _look_on(self) -> None:
        """While there are watchers. The next look waits until the engine has answered the last one."""
        self._worker.between_steps(self._observer.start)
        try:
            while self._watchers and not self._closed:
                if self._state.apply(await self._look()):
                    self._tell()
                await self._pause(PERIOD)
        except Exception as error:  # noqa: BLE001 (what a page shows must not harm the server)
            log.error("the page's view of the cache failed: %s: %s", type(error).__name__, error)
            self.close()
        finally:
            self._worker.between_steps(self._observer.stop)
            self._state.forget()
            self._looking = None

    async def _look(self) -> Observation:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Observation] = loop.create_future()

        def look() -> None:
            found: Observation | Exception
            try:
                found = self._observer.look()
            except Exception as error:  # noqa: BLE001 (raised where it is waited for)
                found = error
            loop.call_soon_threadsafe(_settle, answer, found)

        self.n_looks += 1
        self._worker.between_steps(look)
        return await answer

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher.changed.set()


def _settle(answer: "asyncio.Future[Observation]", found: Observation | Exception) -> None:
    if answer.done():  # cancelled
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


class Stream(Response):
    """The response. It ends when the client leaves, when it does not read for `reader_seconds`, and when the server
    stops."""

    def __init__(self, live: Live, caller: Caller, past: Callable[[], Sequence[Lane]], reader_seconds: float) -> None:
        self._live = live
        self._caller = caller
        self._past = past
        self._reader_seconds = reader_seconds
        self._watcher = live.enter()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        left = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            log.warning("a watcher did not read for %g s: its stream is closed", self._reader_seconds)
        finally:
            self._live.leave(self._watcher)
            for task in (sending, left):
                task.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        head = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        async for line in self._live.lines(self._watcher, self._caller, self._past):
            async with asyncio.timeout(self._reader_seconds):
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
