"""`kvarn bench`: speed by test, depth and batch, in llama-bench's vocabulary. `kvarn bench serve` loads a server."""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from kvarn.backends import BACKENDS
from kvarn.backends.pool import default_threads
from kvarn.bench import suite
from kvarn.bench.case import Case, cases
from kvarn.bench.machine import Bandwidth, facts
from kvarn.bench.peers import connect
from kvarn.bench.subject import Setup
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.strategy import NAMES
from kvarn.cli import bench_serve, flags
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_table
from kvarn.errors import KvarnError
from kvarn.llm import LLM


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", default="smollm2", help="name, .gguf, folder, hf:org/repo (default: smollm2)")
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tokens of a prompt; 0: none (512)")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="tokens to generate; 0: none (128)")
    parser.add_argument("-d", "--n-depth", default="0", metavar="N,..", help="tokens in the cache before that (0)")
    parser.add_argument("-b", "--batch", default="1", metavar="N,..", help="sequences side by side (1)")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, help="most tokens per step (%(default)s)")
    parser.add_argument("-t", "--threads", type=int, help="threads (default: one per core)")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="%(default)s, or the NumPy oracle")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="the median of so many (%(default)s)")
    parser.add_argument("-f", "--file", help="a text to fill the cache with (default: random ids)")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    group = parser.add_argument_group("cache")
    group.add_argument("--cache", default="auto", metavar="A,..", help=f"of {', '.join(NAMES)} (auto)")
    group.add_argument("--cache-type", default="bf16", metavar="X,..", help=f"of {', '.join(CODECS)} (bf16)")
    group.add_argument("--cache-layout", choices=tuple(LAYOUTS), help="order of the bytes in a block")
    group.add_argument("--block-size", type=int, help="slots per block, a power of two from 16")
    group.add_argument("--window", type=int, help="how far back a token sees")
    group.add_argument("--pinned", type=int, help="first tokens that stay visible outside the window")
    group = parser.add_argument_group("a peer beside it, in turn with each repetition")
    group.add_argument("--against", metavar="URL|llama-cpp-python", help="an OpenAI-compatible server, or llama.cpp")
    group.add_argument("--against-python", metavar="PATH", help="interpreter that has the peer (KVARN_PEER_PYTHON)")
    tools = parser.add_subparsers(dest="tool", metavar="serve", title="another benchmark")
    bench_serve.add(tools.add_parser("serve", help="load for a server", description="load for a server"))


def run(args: argparse.Namespace) -> None:
    if getattr(args, "tool", None) == "serve":
        bench_serve.run(args)
        return
    chosen, setups = cases_of(args), setups_of(args)
    suite.check(chosen, setups, args.repetitions)
    text = None if args.file is None else flags.read_text(args.file)
    rows: list[suite.Row] = []
    bandwidth = Bandwidth(args.threads or default_threads())
    try:
        with ProgressLine() as line:
            collect(rows, args, chosen, setups, bandwidth, text, line)
    finally:  # what was measured before Ctrl-C, or before the peer gave up, is shown
        model = Path(args.model).name if Path(args.model).exists() else args.model
        if rows and args.json:
            print(json.dumps({"model": model, "rows": rows, "machine": facts(bandwidth)}, indent=2))
        elif rows:
            show(model, rows, facts(bandwidth))


def collect(
    rows: list[suite.Row],
    args: argparse.Namespace,
    chosen: Sequence[Case],
    setups: Sequence[Setup],
    bandwidth: Bandwidth,
    text: str | None,
    line: ProgressLine,
) -> None:
    chunk, threads = args.ubatch_size, bandwidth.threads
    # The model's own cache is not used: each setup brings one.
    llm = LLM(
        args.model,
        context=32,
        max_seqs=1,
        max_batch_tokens=chunk,
        threads=args.threads,
        backend=args.backend,
        progress=line,
    )
    tokens = None if text is None else llm.tokenizer.encode(text)
    vocabulary = llm.config.vocab_size
    with connect(args.against, args.against_python, args.model, vocabulary, threads, chunk, chosen) as peer:
        for row in suite.run(llm, setups, chosen, args.repetitions, bandwidth, tokens, peer, line):
            rows.append(row)  # one by one: they outlive an interruption


def cases_of(args: argparse.Namespace) -> list[Case]:
    return cases(
        numbers(args.n_prompt, "-p", 0),
        numbers(args.n_gen, "-n", 0),
        numbers(args.n_depth, "-d", 0),
        numbers(args.batch, "-b", 1),
    )


def setups_of(args: argparse.Namespace) -> list[Setup]:
    return [
        Setup(cache, codec, args.cache_layout, args.block_size, args.window, args.pinned, args.ubatch_size)
        for cache, codec in product(
            names(args.cache, "--cache", NAMES), names(args.cache_type, "--cache-type", tuple(CODECS))
        )
    ]


def numbers(text: str, flag: str, least: int) -> list[int]:
    """'0,1024' -> [0, 1024], without repeats."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise KvarnError(f"{flag} {text!r}: give whole numbers with commas between them, as in 0,1024") from None
    if min(found) < least:
        raise KvarnError(f"{flag} {min(found)}: it must be at least {least}")
    return list(dict.fromkeys(found))


def names(text: str, flag: str, known: Sequence[str]) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for name in found:
        if name not in known:
            raise KvarnError(f"{flag} {name!r}: there are {', '.join(known)}")
    return list(dict.fromkeys(found))


def show(model: str, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, object]) -> None:
    print(f"{model}, {machine['threads']} threads, {machine['isa']}, {machine['cpu']}\n")
    header = ["test", "cache", "type", "depth", "batch", "tok/s", "spread", "MB/token", "GB/s", "of memory"]
    lines = [line_of(row) for row in rows]
    against = [row["against"] for row in rows if "against" in row]
    if against:
        header += ["peer tok/s", "spread", "times", "peer's setting"]
        for line, peer in zip(lines, against, strict=True):
            line += [f"{peer['tok_s']:,.1f}", percent(peer["spread"]), f"{peer['ratio']:.2f}", peer["setting"]]
    print_table(header, lines, left=3)
    if against:
        print(f"\npeer: {against[0]['engine']}")


def line_of(row: Mapping[str, Any]) -> list[str]:
    strategy = row["cache"] if row["cache"] == row["strategy"] else f"{row['cache']} -> {row['strategy']}"
    return [
        row["test"],
        strategy,
        row["cache_type"],
        str(row["depth"]),
        str(row["batch"]),
        f"{row['tok_s']:,.1f}",
        percent(row["spread"]),
        f"{row['bytes_per_token'] / 1e6:.1f}",
        f"{row['gb_s']:.1f}",
        percent(row["bandwidth_share"]),
    ]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
