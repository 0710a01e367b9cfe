"""Compares the strategies: prefill and decode by length and batch, memory, and with --text the perplexity.

The repetitions of a strategy are interleaved with those of a contiguous cache. `times` is the ratio of the
two. The row of contiguous itself shows the noise. `concatenating` is a naive cache: for every token it
copies all keys and values into arrays that are longer by one, in addition to the contiguous step. Windowed
strategies see WINDOW tokens. With longer texts they do less work and give other answers.

    python bench/strategies.py [-m smollm2] [-l 128,1024,4096] [-b 1,8] [-t 2] [--text FILE] [--out FILE]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.backends.pool import default_threads
from kvarn.bench import suite
from kvarn.bench.case import Case, Reading
from kvarn.bench.ids import RandomIds
from kvarn.bench.machine import Bandwidth, facts
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.cli.bench import numbers
from kvarn.cli.flags import read_text
from kvarn.cli.table import human_bytes, print_table
from kvarn.engine import scoring
from kvarn.errors import KvarnError
from kvarn.llm import LLM

WINDOW = 1024
PROMPT, GENERATED = 256, 32
SCORED = 2048  # tokens of a perplexity window: more than WINDOW, so that the window has an effect
RATES = ("pp tok/s", "times", "tg tok/s", "times", "ms/step", "GB/s")
SETUPS = {
    "contiguous": Setup("contiguous"),
    "concatenating": Setup("contiguous"),
    "head-major": Setup("head-major"),
    "repeated": Setup("repeated"),
    "ring": Setup("ring", window=WINDOW),
    "sliding": Setup("sliding", window=WINDOW),
    "sinks": Setup("sinks", window=WINDOW),
    "paged 16": Setup("paged", block_size=16),
    "paged 32": Setup("paged", block_size=32),
    "paged 64": Setup("paged", block_size=64),
    "auto": Setup("auto"),
}


class Concatenating(EngineSubject):
    """Copies the keys and values of every layer into longer arrays for each token."""

    def measure(self, case: Case) -> Reading:
        specs = self.engine.program.config.layer_specs
        self.held = [np.ones((2, *shape(spec, case)), np.uint16) for spec in specs]
        return super().measure(case)

    def _generate(self, n: int) -> int:
        new = [held[:, :, :1] for held in self.held]
        tokens = 0
        for _ in range(n):
            for held, one in zip(self.held, new, strict=True):
                np.concatenate((held, one), axis=2)
            tokens += len(self.engine.step())
        return tokens


def shape(spec: Any, case: Case) -> tuple[int, int, int]:
    return case.batch * spec.n_kv_heads, max(case.depth, 1), spec.k_dim


def sweep(llm: LLM, length: int, batch: int, repetitions: int, bandwidth: Bandwidth) -> list[dict[str, Any]]:
    """All strategies at one length and batch, each interleaved with a contiguous cache."""
    cases = [Case("pp", min(PROMPT, length), max(length - PROMPT, 0), batch), Case("tg", GENERATED, length, batch)]
    context = max(case.context for case in cases)  # `auto` chooses by it
    ids = RandomIds(llm.config.vocab_size, context)
    plain = EngineSubject(build(llm, SETUPS["contiguous"], context, batch), batch, ids, llm.program.nbytes)
    rows = []
    for name, setup in SETUPS.items():
        print(f"length {length}, batch {batch}: {name}", file=sys.stderr, flush=True)
        kind = Concatenating if name == "concatenating" else EngineSubject
        try:
            ours = kind(build(llm, setup, context, batch), batch, ids, llm.program.nbytes)
        except KvarnError as error:  # `repeated` refuses a model without GQA
            print(f"  left out: {error}", file=sys.stderr)
            continue
        for case in cases:
            row = suite.measure(ours, plain, case, setup, repetitions, bandwidth)
            rows.append({"name": name, "length": length} | row)
        ours.close()
    return rows


def quality(llm: LLM, tokens: list[int], windows: int) -> dict[str, float]:
    """Perplexity by strategy. It is equal for all strategies without a window."""
    perplexities = {}
    bos = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    for name, setup in SETUPS.items():
        try:
            engine = build(llm, setup, SCORED, 1)
        except KvarnError:
            continue
        chunk = min(setup.chunk, SCORED)
        score = scoring.perplexity(llm.program, engine.memory, engine.cache, tokens, SCORED, windows, bos, chunk)
        perplexities[name] = score.ppl
    return perplexities


def show(rows: list[dict[str, Any]], perplexities: dict[str, float]) -> None:
    print("strategies by length and batch; times: tokens per second over those of a contiguous cache beside it\n")
    header = ("strategy", "length", "batch", *RATES, "bytes", "ppl")
    lines = []
    for pp, tg in zip(rows[::2], rows[1::2], strict=True):
        name = pp["name"] if pp["name"] != "auto" else f"auto -> {pp['strategy']}"
        ppl = perplexities.get(pp["name"])
        lines.append(
            (
                name,
                str(pp["length"]),
                str(pp["batch"]),
                f"{pp['tok_s']:,.0f}",
                f"{pp['against']['ratio']:.2f}",
                f"{tg['tok_s']:,.0f}",
                f"{tg['against']['ratio']:.2f}",
                f"{tg['ms_per_step']:.2f}",
                f"{tg['gb_s']:.1f}",
                human_bytes(tg["cache_bytes"]),
                "" if ppl is None else f"{ppl:.3f}",
            )
        )
    print_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-l", "--lengths", default="128,1024,4096")
    parser.add_argument("-b", "--batches", default="1,8")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--text", help="also measure perplexity on this file")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text to score")
    parser.add_argument("--out", type=Path, help="write the JSON of this run here")
    args = parser.parse_args()
    bandwidth = Bandwidth(args.threads or default_threads())
    llm = LLM(args.model, context=32, max_seqs=1, threads=args.threads, backend="cpu")
    rows: list[dict[str, Any]] = []
    for length in numbers(args.lengths, "-l", 1):
        for batch in numbers(args.batches, "-b", 1):
            rows += sweep(llm, length, batch, args.repetitions, bandwidth)
    perplexities = quality(llm, llm.tokenizer.encode(read_text(args.text)), args.windows) if args.text else {}
    if args.out:
        result = {"model": args.model, "rows": rows, "perplexity": perplexities, "machine": facts(bandwidth)}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(rows, perplexities)


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
