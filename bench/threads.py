"""Measures how speed grows with threads.

python bench/threads.py [-m smollm2] [-m QWEN.gguf] [-t 1,2,4,8,16] [-r 5] [--batch 32] [--out FILE]
"""

import argparse
import json
import sys
from pathlib import Path

from kvarn.backends.pool import processors
from kvarn.bench.case import Case, Figure
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
    found: dict[str, object] = {"machine": facts(Bandwidth(counts[-1]))}
    for model in args.model or ["smollm2"]:
        found[model] = curve(model, counts, args)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def wanted(args: argparse.Namespace, context: int) -> list[Case]:
    depths = [0, args.depth] if 0 < args.depth < context - args.n - 2 else [0]
    found = [Case("tg", args.n, depth) for depth in depths]
    found += [Case("pp", args.prompt)] if args.prompt else []
    return found + ([Case("tg", args.n // 2, 128, args.batch)] if args.batch > 1 else [])


def curve(model: str, counts: list[int], args: argparse.Namespace) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for threads in counts:
        llm = LLM(model, context=32, max_seqs=1, threads=threads, backend="cpu")
        for case in wanted(args, llm.config.context):
            figure = measured(llm, case, args.repetitions)
            lines.append({"threads": threads, "case": label(case), "tok_s": figure.tok_s})
            print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{model}, tokens/s\n")
    lines.sort(key=lambda line: str(line["case"]))
    rows = [(str(line["case"]), str(line["threads"]), f"{line['tok_s']:,.1f}") for line in lines]
    print_table(("case", "threads", "tokens/s"), rows, left=0)
    return lines


def measured(llm: LLM, case: Case, repetitions: int) -> Figure:
    engine = build(llm, Setup("paged"), case.context, case.batch)
    subject = EngineSubject(engine, case.batch, RandomIds(llm.config.vocab_size, case.context), llm.program.nbytes)
    subject.prepare(case)
    readings = [subject.measure(case) for _ in range(repetitions)]
    subject.close()
    return Figure.of(readings)


def label(case: Case) -> str:
    if case.kind == "pp":
        return f"prefill {case.n}"
    return f"batch {case.batch}" if case.batch > 1 else f"decode @ {case.depth}"


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
