"""How fast each candidate decodes at several depths, and how long it writes what the base writes.

Each candidate has an engine over its own cache, and all share the weights. The caches are filled with the
user's text to a depth. Then the candidates take turns: base, first, second, ..., base, first, ... So other
load on the machine affects all of them equally. The tokens are greedy, so a candidate writes other tokens
than the base only because its cells or its window differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.bench.case import GENERATE, Case, Figure, Reading
from kvarn.bench.ids import TextIds
from kvarn.bench.subject import EngineSubject
from kvarn.cache.prefix import common
from kvarn.comparison.candidate import Candidate
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.errors import KvarnError
from kvarn.llm import LLM
from kvarn.loading.progress import Progress, quiet


@dataclass(frozen=True, slots=True)
class Speed:
    depth: int  # tokens in the cache before the first generated one
    figure: Figure
    generated: int
    first_different: int | None  # index of the first generated token that is not the base's; None: all are equal


GENERATED = 64  # tokens, in long contexts


def cases(depths: Sequence[int] | None, n: int | None, context: int) -> list[Case]:
    """Generate n tokens at each depth. Without depths: at the beginning, the middle and the end of the context."""
    if n is None:
        n = min(GENERATED, context // 4)
    if n == 0:
        return []
    deepest = context - n - 2
    if deepest < 0:
        raise KvarnError(f"-n {n} does not fit windows of {context:,} tokens: lower -n, or raise -c")
    if depths and max(depths) > deepest:
        raise KvarnError(f"-d {max(depths)}: with -n {n} and -c {context}, {deepest} is the most")
    wanted = (0, context // 2, deepest) if depths is None else depths
    return [Case(GENERATE, n, depth) for depth in sorted({min(depth, deepest) for depth in wanted})]


def speeds(
    llm: LLM,
    candidates: Sequence[Candidate],
    tokens: Sequence[int],
    chosen: Sequence[Case],
    repetitions: int,
    progress: Progress = quiet,
) -> list[list[Speed]]:
    """By candidate. Their caches must have no open sequences."""
    if not chosen:
        return [[] for _ in candidates]
    ids = TextIds(tokens, 1, max(case.context for case in chosen))
    subjects = [
        EngineSubject(
            Engine(llm.program, each.memory, each.cache, EngineConfig(each.setup.chunk)), 1, ids, llm.program.nbytes
        )
        for each in candidates
    ]
    found: list[list[Speed]] = [[] for _ in candidates]
    turns, total = 0, len(chosen) * len(subjects) * (repetitions + 1)
    for case in chosen:
        readings: list[list[Reading]] = [[] for _ in subjects]
        for repetition in range(repetitions + 1):
            for subject, its, each in zip(subjects, readings, candidates, strict=True):
                progress(f"decoding after {case.depth:,} tokens, {each.name}", turns, total)
                if repetition:
                    its.append(subject.measure(case))
                else:
                    subject.prepare(case)
                turns += 1
        written = [subject.generated(case) for subject in subjects]
        for its, speed, words in zip(readings, found, written, strict=True):
            speed.append(Speed(case.depth, Figure.of(its), case.n, first_different(written[0], words)))
    progress("done", total, total)
    for subject in subjects:
        subject.close()
    return found


def first_different(a: Sequence[int], b: Sequence[int]) -> int | None:
    equal = common(a, b)
    return None if equal == len(a) == len(b) else equal
