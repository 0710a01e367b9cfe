"""Compiles kernels in processes of their own, several at a time.

    python -m kvarn.backends.cuda.workers SOURCES     a worker: tasks on standard input, results on standard output

A worker is a new Python and not a fork: Triton and its threads stay out of the caller's process, and the caller's
main module is not run again. What Triton keeps on disk goes to a folder that is removed at the end, and variables
of the environment that change what Triton does are not passed on.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from kvarn.backends.cuda.specs import Kernel
from kvarn.backends.cuda.store import COMPILED_AS, MODULES, SOURCES, Binary
from kvarn.errors import printable

Task = tuple[Kernel, int]
Result = tuple[Kernel, int, Binary | str]  # a text says why it does not compile
MOST_WORKERS = 16  # each takes about a second to start


def refusal(kernel: Kernel, target: int, reason: str) -> str:
    return f"the kernel {kernel.title} does not compile for sm_{target}: {reason}"


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(tasks: Sequence[Task], sources: Path = SOURCES, jobs: int | None = None) -> Generator[Result]:
    """A result for every task, in the order in which they are ready."""
    waiting: queue.SimpleQueue[list[Task]] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Result] = queue.SimpleQueue()
    groups = _of_one_ptx(tasks)
    for group in groups:
        waiting.put(group)
    with tempfile.TemporaryDirectory(prefix="kvarn-kernels-") as folder:
        n_workers = min(jobs or processors(), len(groups), MOST_WORKERS)
        workers = [_Worker(Path(folder), number, sources) for number in range(n_workers)]
        threads = [threading.Thread(target=worker.work, args=(waiting, ready), daemon=True) for worker in workers]
        try:
            for thread in threads:
                thread.start()
            for _ in tasks:
                yield ready.get()
        finally:
            for worker in workers:
                worker.stop()
            for thread in threads:
                thread.join()


def _of_one_ptx(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that share PTX go to one worker, which then compiles it once."""
    groups: dict[Task, list[Task]] = {}
    for kernel, target in tasks:
        groups.setdefault((kernel, COMPILED_AS.get(target, target)), []).append((kernel, target))
    return list(groups.values())


class _Worker:
    """A process, started for its first task and again after a crash."""

    def __init__(self, folder: Path, number: int, sources: Path) -> None:
        self.sources = sources
        self.errors = folder / f"errors-{number}"
        self.triton = folder / f"triton-{number}"
        self.stopped = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def work(self, waiting: "queue.SimpleQueue[list[Task]]", ready: "queue.SimpleQueue[Result]") -> None:
        """Tasks until there are no more, or until it is stopped."""
        while not self.stopped:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                break
            for kernel, target in group:
                ready.put((kernel, target, self._ask(kernel, target)))
        self._end()

    def stop(self) -> None:
        """From another thread. The worker's own thread then reads the end of its output, and cleans up."""
        with self._lock:
            self.stopped = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, kernel: Kernel, target: int) -> Binary | str:
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump((kernel, target), process.stdin)
            process.stdin.flush()
            answer: Binary | str = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            status = self._end()
            lines = self.errors.read_text(errors="replace").split("\n") if self.errors.exists() else []
            said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            return f"its process ended with status {status}: {printable(said, 200)}"
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self.stopped:
                raise EOFError
            if self._process is None:
                command = [sys.executable, "-P", "-m", __name__, str(self.sources)]
                with self.errors.open("wb") as errors:
                    self._process = subprocess.Popen(
                        command, env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                    )
            return self._process

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        return kept | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_CACHE_DIR": str(self.triton),
            "TRITON_DISABLE_LINE_INFO": "1",  # it has paths of the machine that compiles
        }

    def _end(self) -> int | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what could not be written is not needed any more
                    stream.close()
        return process.wait()


def main() -> None:
    """A worker's loop. Only results go to standard output: what else is printed there goes to standard error."""
    import importlib

    package = importlib.import_module(MODULES)
    package.__path__.insert(0, sys.argv[1])
    from kvarn.backends.cuda.build import compile_kernel

    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            kernel, target = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Binary | str = compile_kernel(kernel, target)
        except Exception as error:  # noqa: BLE001 (a compiler may raise anything; the caller reports it)
            answer = _in_one_line(error)
        pickle.dump(answer, results)
        results.flush()


def _in_one_line(error: BaseException) -> str:
    """The place, the type and the reason. A compiler's message ends with the reason, after the source; if a function
    that was called does not compile, the reason is in the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = f"{lines[0]} " if len(lines) > 1 and lines[0].startswith("at ") else ""
    reason = error
    while reason.__cause__ is not None:
        reason = reason.__cause__
    said = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return printable(f"{where}{type(error).__name__}: {said[-1] if said else 'no message'}", 300)


if __name__ == "__main__":
    main()
