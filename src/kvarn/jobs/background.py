"""A thread that steps the engine while there are jobs, for callers that must not wait: an event loop.

`wake` tells it that there is a new job. `stop` ends it after the step that it is in. The thread keeps
the runner alive, and with it the model, so the owner must stop it.
"""

import logging
import threading

from kvarn.jobs.runner import Runner

log = logging.getLogger("kvarn")


class Background:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._woken = threading.Event()
        self._stopped = False
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is a new job. The first call starts the thread."""
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)
                self._thread.start()
        self._woken.set()

    def stop(self) -> None:
        """Does not wait. Jobs that are unfinished stay so."""
        self._stopped = True
        self._woken.set()

    def _run(self) -> None:
        while not self._stopped:
            self._woken.wait()
            self._woken.clear()
            try:
                self._runner.advance(lambda: self._stopped or not self._runner.busy)
            except Exception as error:  # noqa: BLE001 (every job must get an error)
                log.error("the engine has failed: %s: %s", type(error).__name__, error)
                self._runner.abandon(error)
