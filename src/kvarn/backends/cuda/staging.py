"""Copies to the device through page-locked memory: threads fill buffers while earlier ones are copied.

A model's weights are read from the page cache, and converted, by several threads. The copies keep their
order on the stream, so kernels that are launched after `finish` read what was put.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.cuda.driver import Device, Event

T = TypeVar("T")
Bytes = NDArray[np.uint8]
PIECE = 16 << 20  # bytes of a buffer
MOST_THREADS = 16


@dataclass(slots=True)
class _Buffer:
    memory: Bytes
    copied: Event
    used: bool = False  # a copy from it was begun


@dataclass(slots=True)
class _Filling:
    address: int
    nbytes: int
    buffer: _Buffer
    done: "Future[None]"


class Staging:
    """One thread puts; the others only fill."""

    def __init__(self, driver: Device, threads: int | None = None) -> None:
        n = max(1, min(MOST_THREADS, (os.cpu_count() or 1) if threads is None else threads))
        self._driver = driver
        self._threads = ThreadPoolExecutor(n, "kvarn-weights")
        self._free = deque(_Buffer(driver.pinned(PIECE), driver.event()) for _ in range(n + 1))
        self._filling: deque[_Filling] = deque()

    def put(self, address: int, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        """Have the device's bytes at this address be what `fill` writes, at most PIECE bytes. It is called by another
        thread. What it raises is raised by this call or a later one."""
        assert nbytes <= PIECE
        if not self._free:
            self._send()
        buffer = self._free.popleft()
        if buffer.used:
            self._driver.wait(buffer.copied)
        done = self._threads.submit(fill, buffer.memory[:nbytes])
        self._filling.append(_Filling(address, nbytes, buffer, done))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Have a thread call a function. What was asked for earlier begins earlier."""
        return self._threads.submit(function)

    def finish(self) -> None:
        """Begin the last copies, wait for all, and give the buffers back."""
        while self._filling:
            self._send()
        self._driver.synchronize()
        self.close()

    def close(self) -> None:
        """End the threads. What was put and not copied is lost."""
        self._threads.shutdown(cancel_futures=True)
        self._filling.clear()
        self._free.clear()

    def _send(self) -> None:
        """Copy the oldest buffer."""
        oldest = self._filling.popleft()
        oldest.done.result()
        self._driver.send(oldest.address, oldest.buffer.memory[: oldest.nbytes])
        self._driver.record(oldest.buffer.copied)
        oldest.buffer.used = True
        self._free.append(oldest.buffer)
