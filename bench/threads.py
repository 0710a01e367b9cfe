"""Measures how speed grows with threads.

python bench/threads.py [-m smollm2] [-m QWEN.gguf] [-t 1,2,4,8,16] [-r 5] [--batch 32] [--out FILE]
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from kvarn.backends.pool import processors
from kvarn.bench.case import Case, Figure, Reading
from kvarn.bench.ids import RandomIds
from kvarn.bench.machine import Bandwidth, facts
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.cli.bench import numbers
from kvarn.cli.table import print_table
from kvarn.errors import KvarnError
from kvarn.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", action="append", help="(repeatable)")
    parser.add_argument("-t", "--threads", default="1,2,4,8,16", help="those that this machine has not are left out")
    parser.add_argument("-n", type=int, default=64, help="tokens per repetition of decode")
    parser.add_argument("-d", "--depth", type=int, default=4096, help="tokens in the cache; 0: only an empty one")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens of prefill; 0: none")
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode together; 1: none")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args()
    counts = [n for n in sorted(numbers(args.threads, "-t", 1)) if n <= processors()]
    found: dict[str, object] = {"machine": facts(Bandwidth(counts[-1])), "processors": processors()}
    for model in args.model or ["smollm2"]:
        found[Path(model).name] = curve(model, counts, args)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def wanted(args: argparse.Namespace, context: int) -> list[Case]:
    depths = [0, args.depth] if 0 < args.depth < context - args.n - 2 else [0]
    found = [Case("tg", args.n, depth) for depth in depths]
    found += [Case("pp", args.prompt)] if args.prompt else []
    return found + ([Case("tg", args.n // 2, 128, args.batch)] if args.batch > 1 else [])


def curve(model: str, counts: list[int], args: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    loaded = {n: LLM(model, context=32, max_seqs=1, threads=n, backend="cpu") for n in counts}
    figures = {
        case: measured(loaded, case, args.repetitions) for case in wanted(args, loaded[counts[0]].config.context)
    }
    print(f"\n{model}, tokens/s, and as a multiple of the number of threads before it\n")
    for case, of in figures.items():
        ratios = ["", *(f"{of[b].over(of[a]):.2f}" for a, b in itertools.pairwise(counts))]
        rows = [(str(n), f"{of[n].tok_s:,.1f}", ratio) for n, ratio in zip(counts, ratios, strict=True)]
        print_table((label(case), "tokens/s", "ratio"), rows, left=0)
    return {label(case): {n: list(figure.samples) for n, figure in of.items()} for case, of in figures.items()}


def measured(loaded: dict[int, LLM], case: Case, repetitions: int) -> dict[int, Figure]:
    """By threads, which alternate: a machine that others use is slower for seconds at a time."""
    subjects = {}
    for n, llm in loaded.items():
        engine = build(llm, Setup("paged"), case.context, case.batch)
        subjects[n] = EngineSubject(engine, case.batch, RandomIds(llm.config.vocab_size, case.context), 0)
        subjects[n].prepare(case)
    readings: dict[int, list[Reading]] = {n: [] for n in subjects}
    for _ in range(repetitions):
        for n, subject in subjects.items():
            readings[n].append(subject.measure(case))
        print(".", end="", file=sys.stderr, flush=True)
    for subject in subjects.values():
        subject.close()
    return {n: Figure.of(found) for n, found in readings.items()}


def label(case: Case) -> str:
    if case.kind == "pp":
        return f"prefill {case.n}"
    return f"batch {case.batch}" if case.batch > 1 else f"decode @ {case.depth}"


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
