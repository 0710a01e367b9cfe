"""Compiles what answers must look like, on threads of its own.

A hostile structure takes as long as the limit of time allows. It delays other new structures only: chats have other
threads, and a structure that was compiled before waits for nothing. If too many wait, the caller gets 503.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from kvarn.chats.rules import Constrain, Rule
from kvarn.errors import KvarnError, StructuresBusy
from kvarn.server.refusal import Refusal
from kvarn.structured import Compiled, Compiler

MOST = 32  # that are compiled or wait for it
RETRY_SECONDS = 10


class Structures:
    """`compiler` is asked for when the first structure comes."""

    def __init__(self, compiler: Callable[[], Compiler], most: int = MOST) -> None:
        self._compiler = compiler
        self._most = most
        self._threads = ThreadPoolExecutor(most, "kvarn-structures")  # those that compile are fewer (compiler.py)
        self._lock = threading.Lock()
        self._n = 0  # under way

    async def constrain(self, rule: Rule | None, field: str) -> Constrain | None:
        """What makes the constraint of a sample. `field` of the request is at fault if it cannot be enforced."""
        if rule is None:
            return None
        with structure_errors(field):
            compiler = self._compiler()
            compiled = compiler.known(rule.structure)
            if compiled is None:
                compiled = await asyncio.wrap_future(self._begin(compiler, rule))
        return rule.constrain(compiled)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, compiler: Compiler, rule: Rule) -> "Future[Compiled]":
        with self._lock:
            if self._n >= self._most:
                raise StructuresBusy("too many structures are being compiled: try again later")
            self._n += 1
        future = self._threads.submit(rule.compile, compiler)
        future.add_done_callback(self._end)
        return future

    def _end(self, future: "Future[Compiled]") -> None:
        with self._lock:
            self._n -= 1


@contextmanager
def structure_errors(field: str) -> Iterator[None]:
    """What cannot be enforced is the fault of this field."""
    try:
        yield
    except StructuresBusy as error:
        raise Refusal(503, str(error), field, retry_after=RETRY_SECONDS) from None
    except KvarnError as error:
        message = str(error).removeprefix(f"{field}: ")
        raise Refusal(400, f"{field}: {message}", field, logged=f"{field} cannot be enforced") from None
