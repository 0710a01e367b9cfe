"""Several threads at once, in tests."""

import threading
import time
from collections.abc import Callable
from typing import Any


def together(*works: Callable[[], Any]) -> list[Any]:
    """Each on a thread of its own, all begun at once; their results, or what they raised."""
    start, results = threading.Barrier(len(works)), [None] * len(works)

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = works[i]()
        except BaseException as error:  # noqa: BLE001 (for the test to look at)
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it hangs"
    return results


def until(reached: Callable[[], object]) -> None:
    """Poll until it holds; fails after a minute."""
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it did not happen within a minute"
        threading.Event().wait(0.001)
