"""Shows on a terminal how much of a prompt is computed, until the first text of the answer.

    for part in stream(llm, job): ...

A prompt that is computed within DELAY shows nothing, and neither does a program whose standard error is
no terminal. Non-goal: printing the answer.
"""

import sys
import threading
from collections.abc import Callable, Iterator

from kvarn.cli.progress import ProgressLine
from kvarn.dialect import Delta
from kvarn.jobs.job import Job
from kvarn.llm import LLM

DELAY = 0.3  # seconds
_INTERVAL = 0.1


def stream(llm: LLM, job: Job, wait: Callable[[], None] = lambda: None) -> Iterator[Delta]:
    """The parts of the answer, with progress before the first one. `wait` is called each time when progress is shown,
    on another thread."""
    parts = llm.stream_job(job).parts()
    with PrefillProgress(job, wait=wait):
        first = next(parts, None)
    if first is not None:
        yield first
        yield from parts


class PrefillProgress:
    """While the block computes the prompt, a thread shows `reading the prompt 38 %`. The line is removed at the end.

    A thread is needed because the caller's thread is inside a step, and a step may take seconds."""

    def __init__(self, job: Job, delay: float = DELAY, wait: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._wait = wait
        self._delay = delay
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="kvarn-prefill-progress", daemon=True)

    def __enter__(self) -> "PrefillProgress":
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _show(self) -> None:
        sample, total = self._job.request.samples[0], len(self._job.request.prompt)
        if self._ended.wait(self._delay):
            return
        with ProgressLine() as line:
            while sample.n_output == 0:
                line("reading the prompt", min(sample.computed, total), total)
                self._wait()
                if self._ended.wait(_INTERVAL):
                    return
