"""Whose turn it is: one thread at a time has the engine, the others wait.

A thread takes the turn to step until what it waits for is there, or for one short call (an add). Calls go first: who
steps looks at `wanted` after every step and gives way. The turn is handed over directly, so nobody who comes later gets
ahead. Who steps also tells those whose wait is over; the others sleep on. Nothing in here knows the engine.
"""

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType

try:  # CPython's own, without the wrappers that turn numbers into enums: 0.5 us per step instead of 10
    import _signal as signal  # type: ignore[import-not-found]
except ImportError:
    import signal

_MAIN = threading.main_thread().ident
Ready = Callable[[], bool]  # asked by any thread, at any time: it looks, and neither waits nor raises


class _Place:
    """A thread in the queue. Its gate opens when it has the turn, or when what it waits for is there."""

    __slots__ = ("gate", "ready", "thread")

    def __init__(self, ready: Ready | None) -> None:
        self.thread = get_ident()
        self.ready = ready
        self.gate = threading.Lock()
        self.gate.acquire()


class Turn:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the queues; held for a few lines, never while somebody computes
        self._owner: dict[str, int] = {}  # at most one; `setdefault` takes the turn in one indivisible step
        self._calls: deque[_Place] = deque()
        self._steps: deque[_Place] = deque()

    @property
    def mine(self) -> bool:
        return self._owner.get("thread") == get_ident()

    @property
    def wanted(self) -> bool:
        """Whether a call waits."""
        return bool(self._calls)

    @property
    def n_waiting(self) -> int:
        """Threads in the queue, calls included."""
        return len(self._calls) + len(self._steps)

    def take(self, ready: Ready | None = None) -> bool:
        """Wait until the turn is this thread's (True) or ready() holds (False). Without `ready` it is a call."""
        return self.take_now() or self._queue(_Place(ready), self._calls if ready is None else self._steps)

    def take_now(self) -> bool:
        """Take the turn if nobody has it; if this thread has it already, it is refused. Neither waits nor locks: safe
        in a finalizer, wherever that runs."""
        return not self.mine and self._owner.setdefault("thread", get_ident()) == get_ident()

    def tell(self) -> None:
        """Wake those whose wait is over; for who has the turn, after a step."""
        with self._lock:
            self._wake()

    def give(self) -> None:
        """Hand the turn on. Nothing happens when it is not this thread's."""
        if not self.mine:  # only its owner can change that, so the answer holds
            return
        with self._lock:
            self._wake()
            queue = self._calls or self._steps
            if queue:
                place = queue.popleft()
                self._owner["thread"] = place.thread
                place.gate.release()
            else:
                self._owner.clear()

    def _queue(self, place: _Place, queue: deque[_Place]) -> bool:
        try:
            with self._lock:
                if self._owner.setdefault("thread", place.thread) == place.thread:
                    return True
                if place.ready is not None and place.ready():  # since it was asked: nobody would tell
                    return False
                queue.append(place)
            place.gate.acquire()
        finally:
            with self._lock:
                if place in queue:  # interrupted
                    queue.remove(place)
        return self.mine

    def _wake(self) -> None:
        for place in [place for place in self._steps if place.ready is not None and place.ready()]:
            self._steps.remove(place)
            place.gate.release()


class Uninterrupted:
    """Within it, Ctrl-C waits for the end: in the middle of a step it would leave bookkeeping half done. A second one
    does not wait. A program that handles the signal itself keeps its handler."""

    __slots__ = ("_ours", "asked")

    def __enter__(self) -> "Uninterrupted":
        self.asked = False  # whether it came
        # Python runs handlers on the main thread only, and only there can they be set.
        self._ours = get_ident() == _MAIN and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.asked:
                raise KeyboardInterrupt
