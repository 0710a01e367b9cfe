"""Compares the instruction sets of this machine: the same bits, and how fast each is.

The bits are those of a model's logits over random tokens, in one chunk and token by token. The speeds are those of
products of many rows, for each kind of weights (one thread), and of the model. Repetitions of the sets alternate.

    python bench/instruction_sets.py [-m smollm2] [--only avx2,avxvnni] [-t 2] [-r 3] [--kinds Q4_1,Q4_K]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvarn import native
from kvarn.backends.cpu import trials
from kvarn.bench.case import Case
from kvarn.bench.ids import RandomIds
from kvarn.bench.subject import EngineSubject, Setup, build, plan_of
from kvarn.cache.cache import KVCache
from kvarn.cli.table import print_table
from kvarn.engine.scoring import score
from kvarn.errors import KvarnError
from kvarn.llm import LLM

KINDS = "Q4_0,Q4_1,Q5_K,Q8_0,Q2_K,Q3_K,Q4_K,Q6_K"
CASES = {"decode @ 0": Case("tg", 32), "batch 32": Case("tg", 16, 128, 32), "prefill 512": Case("pp", 512)}
TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--only", help="names, separated by commas; without it all that run here, except portable")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--kinds", default=KINDS)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [name for name in native.isas() if name != "portable"]
    print(f"here run {', '.join(native.isas())}; compared: {', '.join(names)}\n")
    loaded = {}
    for name in names:
        with selected(name):
            loaded[name] = LLM(args.model, context=32, max_seqs=1, threads=args.threads, backend="cpu")
    compare(loaded)
    print_table(("GMAC/s", *names), list(products(names, args.kinds.split(","), args.repetitions)), left=0)
    print()
    print_table(("tokens/s", *names), list(speeds(loaded, args.repetitions)), left=0)


@contextmanager
def selected(name: str) -> Iterator[None]:
    before = native.isa()
    native.select_isa(name)
    try:
        yield
    finally:
        native.select_isa(before)


def compare(loaded: dict[str, LLM]) -> None:
    """Ends the program at the first difference."""
    for codec in ("bf16", "int8"):
        first = {name: logits(llm, codec, TOKENS) for name, llm in loaded.items()}
        expected = next(iter(first.values()))
        for name, llm in loaded.items():
            if not (first[name] == expected).all():
                raise KvarnError(f"{name}, {codec} cells: other bits than {next(iter(first))}")
            if not (logits(llm, codec, 1) == expected).all():
                raise KvarnError(f"{name}, {codec} cells: token by token gives other bits than one chunk")
    print(f"{TOKENS} rows of logits are equal in every bit: in one chunk, token by token, and in all sets\n")


def logits(llm: LLM, codec: str, chunk: int) -> np.ndarray:
    planned = plan_of(llm, Setup("paged", codec, chunk=chunk), TOKENS + 1, 1)
    tokens = RandomIds(llm.config.vocab_size, TOKENS)(0, TOKENS)
    return score(llm.program, llm.backend.memory(planned), KVCache(planned), tokens, 0, chunk).view(np.uint32)


def products(names: list[str], kinds: list[str], repetitions: int) -> Iterator[list[str]]:
    pool = native.Pool(1)
    for kind in kinds:
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(repetitions):
            for name in names:
                with selected(name):
                    found[name].append(1e-9 / trials.multiply(pool, kind))
        yield [kind, *(f"{statistics.median(each):.1f}" for each in found.values())]


def speeds(loaded: dict[str, LLM], repetitions: int) -> Iterator[list[str]]:
    for label, case in CASES.items():
        subjects = {}
        for name, llm in loaded.items():
            ids = RandomIds(llm.config.vocab_size, case.context)
            engine = build(llm, Setup("paged"), case.context, case.batch)
            subjects[name] = EngineSubject(engine, case.batch, ids, llm.program.nbytes)
            subjects[name].prepare(case)
        found: dict[str, list[float]] = {name: [] for name in loaded}
        for _ in range(repetitions):
            for name, subject in subjects.items():
                found[name].append(subject.measure(case).rate)
        yield [label, *(f"{statistics.median(each):,.1f}" for each in found.values())]


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
