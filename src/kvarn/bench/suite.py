"""Runs the cases of a benchmark on kvarn and on a peer, and makes a table row of each case.

The repetitions of a peer are interleaved with ours (ours, theirs, ours, theirs, ...), so that other load
on the machine affects both equally.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from kvarn.bench.case import Case, Figure, Reading, Subject
from kvarn.bench.ids import RandomIds, TextIds
from kvarn.bench.machine import Bandwidth
from kvarn.bench.peers.recorded import Recorded
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.errors import KvarnError
from kvarn.llm import LLM
from kvarn.loading.progress import Progress, quiet
from kvarn.words import counted

Row = dict[str, object]


def run(
    llm: LLM,
    setups: Sequence[Setup],
    cases: Sequence[Case],
    repetitions: int,
    bandwidth: Bandwidth,
    text: Sequence[int] | None = None,
    peer: Subject | None = None,
    recorded: Recorded | None = None,
    progress: Progress = quiet,
) -> Iterator[Row]:
    """One row per setup and case."""
    check(cases, setups, repetitions)
    done, total = 0, len(setups) * len(cases)
    for setup in setups:
        for batch in dict.fromkeys(case.batch for case in cases):
            chosen = [case for case in cases if case.batch == batch]
            ours = subject(llm, setup, chosen, text)
            for case in chosen:
                progress(f"{setup.cache} {setup.cache_type}: {case.name} @ {case.depth} x {case.batch}", done, total)
                row = measure(ours, peer, case, setup, repetitions, bandwidth)
                yield row if recorded is None else beside(recorded, case, row)
                done += 1
            ours.close()
            del ours  # its cache, before the next one is allocated
    progress("done", total, total)


def check(cases: Sequence[Case], setups: Sequence[Setup], repetitions: int) -> None:
    if not cases:
        raise KvarnError("nothing to measure: -p and -n are both 0")
    if repetitions < 1:
        raise KvarnError(f"{repetitions} repetitions; it must be at least 1")
    for setup in setups:
        for case in cases:
            if case.batch > setup.chunk:
                step = f"a step of {counted(setup.chunk, 'token')}"
                raise KvarnError(f"a batch of {case.batch} does not fit {step}: raise -ub")


def subject(llm: LLM, setup: Setup, cases: Sequence[Case], text: Sequence[int] | None = None) -> EngineSubject:
    """kvarn with a cache for the longest of these cases, which all have the same batch."""
    context, batch = max(case.context for case in cases), cases[0].batch
    vocabulary = llm.config.vocab_size
    ids = RandomIds(vocabulary, context) if text is None else TextIds(text, batch, context)
    return EngineSubject(build(llm, setup, context, batch), batch, ids, llm.program.nbytes)


def measure(
    ours: Subject, peer: Subject | None, case: Case, setup: Setup, repetitions: int, bandwidth: Bandwidth
) -> Row:
    subjects = [ours] if peer is None else [ours, peer]
    for each in subjects:
        each.prepare(case)
    readings: list[list[Reading]] = [[] for _ in subjects]
    for _ in range(repetitions):
        for each, its_readings in zip(subjects, readings, strict=True):
            its_readings.append(each.measure(case))
    figure = Figure.of(readings[0])
    row = figures(case, setup, readings[0], figure, bandwidth) | ours.describe()
    if peer is not None:
        theirs = Figure.of(readings[1])
        row["against"] = peer.describe() | {
            "tok_s": theirs.tok_s,
            "spread": theirs.spread,
            "samples": theirs.samples,
            "ratio": figure.over(theirs),
        }
    return row


def beside(recorded: Recorded, case: Case, row: Row) -> Row:
    """The row with the fastest recorded speed of its case, if there is one."""
    speed = recorded.fastest(case)
    if speed is None:
        return row
    ratio = cast(float, row["tok_s"]) / speed.tok_s
    return row | {"against": {"engine": speed.engine, "setting": speed.engine, "tok_s": speed.tok_s, "ratio": ratio}}


def figures(case: Case, setup: Setup, readings: Sequence[Reading], figure: Figure, bandwidth: Bandwidth) -> Row:
    nbytes, tokens = (sum(each) for each in zip(*((r.nbytes, r.tokens) for r in readings), strict=True))
    steps = sum(r.steps for r in readings)
    per_token = nbytes / tokens
    gb_s = per_token * figure.tok_s / 1e9
    return {
        "test": case.name,
        "depth": case.depth,
        "batch": case.batch,
        "cache": setup.cache,
        "cache_type": setup.cache_type,
        "block_size": setup.block_size,
        "window": setup.window,
        "threads": bandwidth.threads,
        "tok_s": figure.tok_s,
        "spread": figure.spread,
        "samples": figure.samples,
        "ms_per_step": 1000 * tokens / steps / figure.tok_s,
        "gb_s": gb_s,
        "bytes_per_token": per_token,
        "bandwidth_share": bandwidth.share(gb_s, round(nbytes / steps)),
    }
