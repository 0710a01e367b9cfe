"""What the server does when the system has no room for another connection: it says so, once a minute.

asyncio stops accepting for a second and calls the loop's exception handler, once for each connection that it
tried to accept. Its own handler writes a traceback each time.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvarn")

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
SECONDS = 60.0  # between two lines in the log


class AcceptFailures:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler for an event loop."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED):
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if self._silent_until is None or now >= self._silent_until:
            self._silent_until = now + SECONDS
            log.error("cannot accept connections now: %s; they wait (said once a minute)", error.strerror)
