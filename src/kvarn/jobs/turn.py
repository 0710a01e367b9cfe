"""The turn: one thread at a time may use the engine, the other threads wait in a queue.

A thread takes the turn for one short call, for example an add, or to step until its `ready` is true.
Calls come first: the stepping thread checks `wanted` after every step and gives the turn away. The turn
goes directly to the first thread in the queue, so a later thread cannot overtake. The stepping thread
also wakes the threads whose `ready` has become true. Non-goal: the engine, which this module does not
know.
"""

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType

try:  # CPython's C module: without the enum wrappers of `signal`, 0.5 us per step instead of 10
    import _signal as signal  # type: ignore[import-not-found]
except ImportError:
    import signal

_MAIN = threading.main_thread().ident
Ready = Callable[[], bool]  # any thread may call it at any time; it must not wait or raise


class _Place:
    """A thread in the queue. Its gate opens when it gets the turn, or when its ready() is true."""

    __slots__ = ("gate", "ready", "thread")

    def __init__(self, ready: Ready | None) -> None:
        self.thread = get_ident()
        self.ready = ready
        self.gate = threading.Lock()
        self.gate.acquire()


class Turn:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the queues; held for a few lines, never during a step
        self._owner: dict[str, int] = {}  # at most one entry: `setdefault` takes the turn atomically
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
        """Wait until this thread has the turn (True) or ready() is true (False). Without `ready`, it is a call."""
        return self.take_now() or self._queue(_Place(ready), self._calls if ready is None else self._steps)

    def take_now(self) -> bool:
        """Take the turn if it is free. False if any thread has it, also this one.

        Does not wait and takes no lock, so it is safe in a finalizer on any thread."""
        return not self.mine and self._owner.setdefault("thread", get_ident()) == get_ident()

    def tell(self) -> None:
        """Wake the threads whose ready() is true. The thread with the turn calls it after a step."""
        with self._lock:
            self._wake()

    def give(self) -> None:
        """Pass the turn to the next thread. Does nothing if this thread does not have it."""
        if not self.mine:  # no lock needed: only the owner can give the turn away
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
                if place.ready is not None and place.ready():  # it became true before we queued: no wake-up would come
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
    """Delays Ctrl-C until the end of the block, because it would interrupt a step's bookkeeping. A second Ctrl-C is
    not delayed. A program's own handler of the signal stays in place."""

    __slots__ = ("_ours", "asked")

    def __enter__(self) -> "Uninterrupted":
        self.asked = False  # whether Ctrl-C was pressed
        # Python sets and runs signal handlers on the main thread only.
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
