"""Encodes without Python's lock, until the interpreter exits.

At the exit Python ends daemon threads that ask for the lock. Inside the `tokenizers` library that would
abort the process. So from then on the lock is kept, and the exit waits for calls that run without it.
`native/unlocked.hpp` does the same for our own native code.
"""

import atexit
import os
from threading import Condition

import tokenizers


class _Unlocked:
    def __init__(self) -> None:
        self._exiting = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._finish)

    def _begin(self) -> None:
        self._idle = Condition()
        self._n_running = 0

    def __call__(self, library: tokenizers.Tokenizer, text: str) -> list[int]:
        with self._idle:
            unlocked = not self._exiting
            self._n_running += unlocked
        ids: list[int]
        if not unlocked:
            ids = library.encode(text, add_special_tokens=False).ids
            return ids
        try:  # a batch of one: the library releases the lock only for batches
            ids = library.encode_batch([text], add_special_tokens=False)[0].ids
        finally:
            with self._idle:
                self._n_running -= 1
                self._idle.notify_all()
        return ids

    def _finish(self) -> None:
        with self._idle:
            self._exiting = True
            self._idle.wait_for(lambda: not self._n_running)


unlocked = _Unlocked()
