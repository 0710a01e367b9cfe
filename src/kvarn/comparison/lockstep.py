"""Reads one text with every candidate in lockstep: the same steps of the same tokens, one set of weights.

    for each window of the text, for each step:
        the base's logits, kept until the next step
        for each candidate: its logits, compared and dropped

So the memory for logits does not depend on the length of the text, and no file of logits is written.
Every position of a window is read.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from kvarn.arrays import Floats
from kvarn.backends.base import Program
from kvarn.comparison.candidate import Candidate
from kvarn.comparison.divergence import Base, equal_rows
from kvarn.engine.scoring import Window, read
from kvarn.loading.progress import Progress, quiet


def lockstep(
    program: Program, candidates: Sequence[Candidate], windows: Sequence[Window], chunk: int, progress: Progress = quiet
) -> int:
    """Fill the tracks of all candidates and return the number of positions. The first candidate is the base."""
    total = sum(len(window.tokens) for window in windows)
    ordered = _twins_together(candidates)
    done = 0
    for index, window in enumerate(windows):
        what = f"reading window {index + 1} of {len(windows)} with {len(candidates)} caches"
        with ExitStack() as stack:
            base, *others = [
                stack.enter_context(closing(read(program, each.memory, each.cache, window.tokens, 0, chunk)))
                for each in ordered
            ]
            for start, logits in base:
                step = Base(logits, window.targets[start : start + len(logits)])
                ordered[0].track.add(step, start, logits)
                twin = logits
                for i, (each, reader) in enumerate(zip(ordered[1:], others, strict=True), 1):
                    progress(what, 100 * (done * len(ordered) + i * len(logits)) // (total * len(ordered)), 100)
                    twin = _compare(step, start, each, next(reader)[1], twin)
                done += len(logits)
    progress("done", 100, 100)
    return total


def _compare(step: Base, start: int, each: Candidate, logits: Floats, twin: Floats) -> Floats:
    """The logits of the first of its kind, for the twins that follow it."""
    each.track.add(step, start, logits)
    if each.twin is None:
        return logits
    each.equal_to_twin += equal_rows(twin, logits)
    return twin


def _twins_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each candidate before its twins, so that one array of logits is enough to compare them."""
    first = [each for each in candidates if each.twin is None]
    return [each for one in first for each in (one, *(other for other in candidates if other.twin is one))]
