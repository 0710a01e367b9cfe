"""A thread that does jobs in order, with a bounded queue, so that the engine never waits for a disk.

`offer` never waits: it refuses a job when the queue is full. Only the end of a process waits (`put`, `finish`), and
only while jobs get done: a disk that hangs cannot hold up the exit for more than `patience` seconds. The thread ends
when it has been idle, and the next job starts another one: it keeps nothing alive.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("kvarn")
Job = Callable[[], None]
IDLE = 0.5  # seconds


class Lane:
    def __init__(self, name: str, limit: int, patience: float = 10.0) -> None:
        self._name = name
        self._limit = limit  # bytes of the jobs in the queue
        self._patience = patience
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._nbytes = 0
        self._thread: threading.Thread | None = None
        self._since: float | None = None  # when the job under way began
        self._n_done = 0

    @property
    def nbytes(self) -> int:
        """Of the jobs in the queue and under way."""
        return self._nbytes

    @property
    def busy_seconds(self) -> float:
        """How long the job under way has taken so far."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def has_room(self, nbytes: int) -> bool:
        return not self._jobs or self._nbytes + nbytes <= self._limit

    def offer(self, job: Job, nbytes: int = 0) -> bool:
        """Queue a job; False if the queue is full."""
        with self._changed:
            if not self.has_room(nbytes):
                return False
            self._jobs.append((job, nbytes))
            self._nbytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def put(self, job: Job, nbytes: int) -> bool:
        """Queue a job, after waiting for room if necessary; False if no job got done for a while."""
        return self._wait(lambda: self.has_room(nbytes)) and self.offer(job, nbytes)

    def finish(self) -> bool:
        """Wait until all jobs are done; False if no job got done for a while."""
        return self._wait(lambda: not self._jobs and self._since is None)

    def _wait(self, ready: Callable[[], bool]) -> bool:
        with self._changed:
            until, done = time.monotonic() + self._patience, self._n_done
            while not ready():
                self._changed.wait(max(until - time.monotonic(), 0))
                if self._n_done > done:
                    until, done = time.monotonic() + self._patience, self._n_done
                elif time.monotonic() >= until and not ready():
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._jobs), IDLE):
                    self._thread = None
                    return
                job, nbytes = self._jobs.popleft()
                self._since = time.monotonic()
            try:
                job()
            except Exception as error:  # noqa: BLE001 (the next jobs must be done)
                log.error("%s: %s: %s", self._name, type(error).__name__, error)
            with self._changed:
                self._nbytes -= nbytes
                self._since = None
                self._n_done += 1
                self._changed.notify_all()
