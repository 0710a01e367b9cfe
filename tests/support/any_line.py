"""Raises an error at a chosen line of the engine's bookkeeping, and looks at what is left."""

import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import kvarn
from kvarn import LLM, SamplingParams

_ROOT = Path(kvarn.__file__).parent
BOOKKEEPING = tuple(str(_ROOT / part) for part in ("engine/", "cache/", "jobs/runner.py", "jobs/job.py"))

PARAMS = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 9, [1, 2, 3] * 9 + [4, 5, 6, 7], [7, 8, 9] * 5]
SETTINGS = {
    "paged": {"cache": "paged", "block_size": 16},
    "paged, with preemptions": {"cache": "paged", "block_size": 16, "cache_bytes": 36 << 10},
    "contiguous": {"cache": "contiguous"},
    "ring": {"cache": "ring", "window": 16},
    "sinks": {"cache": "sinks", "window": 16},
}


class AnyLine:
    """`run(work, n, error)` raises the error before the n-th line that `work` runs in the bookkeeping."""

    def __init__(self) -> None:
        self.where: str | None = None  # the line; None if `work` had fewer lines

    def run(self, work: Callable[[], object], n: int, error: type[BaseException]) -> object:
        lines = itertools.count()
        self.where = None

        def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
            file = frame.f_code.co_filename
            if not file.startswith(BOOKKEEPING):
                return None
            # Python reports the end of a `with` block as its first line. An error there would skip the block's exit,
            # which no real error can do.
            if event == "line" and not _opens_block(file, frame.f_lineno) and next(lines) == n:
                sys.settrace(None)
                self.where = f"{file.removeprefix(str(_ROOT))}:{frame.f_lineno}"
                raise error("injected")
            return trace

        sys.settrace(trace)
        try:
            return work()
        finally:
            sys.settrace(None)


def _opens_block(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("with ")


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[completion.tokens for completion in output.completions] for output in llm.generate(PROMPTS, PARAMS)]


def attack(model: Path, settings: dict, error: type[BaseException], first: int, stride: int) -> int:
    """Returns the number of lines tried."""
    llm = LLM(model, max_seqs=6, max_batch_tokens=16, context=64, **settings)
    expected, injected, n = answers(llm), AnyLine(), 0
    preempted = llm.engine.scheduler.n_preemptions
    assert bool(preempted) == ("cache_bytes" in settings)
    while True:
        try:
            got = injected.run(lambda: answers(llm), first + n * stride, error)
            if injected.where is None:
                return n
            assert got == expected, injected.where
        except error:
            pass
        usage = llm.cache.usage()
        held = (usage.sequences, usage.blocks_used, llm.engine.busy, len(llm.engine._requests), len(llm.runner._jobs))
        assert not any(held), (injected.where, held)
        llm.cache.check()
        assert answers(llm) == expected, injected.where
        n += 1
