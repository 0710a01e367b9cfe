"""`kvarn bench`: speed by test, depth and batch, with llama-bench's names. `kvarn bench serve` is in bench_serve.py."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kvarn.backends.pool import default_threads
from kvarn.bench import suite
from kvarn.bench.case import Case, cases
from kvarn.bench.machine import Bandwidth, cpu_name, facts
from kvarn.bench.peers import connect
from kvarn.bench.peers.recorded import Recorded, main_type
from kvarn.bench.subject import Setup
from kvarn.cache.codec import CODECS, cache_types
from kvarn.cache.strategy import NAMES
from kvarn.cli import flags
from kvarn.cli.interrupt import Interrupted, end_line
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError, shown
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json, print_table
from kvarn.errors import KvarnError, printable
from kvarn.llm import LLM
from kvarn.words import counted


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Measure tokens per second for prompts (pp) and for generation (tg), by depth and batch. Also report
the bytes that a token reads, and the share of the memory bandwidth. If options are lists (N,..),
every combination is measured. `kvarn bench serve` measures a server under load instead.""",
        """
kvarn bench model.gguf
kvarn bench -p 0 -n 64 -d 0,4096 --cache contiguous,paged --cache-type bf16,int8
kvarn bench --against llama-cpp-python --against-python ~/peer/bin/python
kvarn bench serve --url http://127.0.0.1:8000 --requests 100 --rate 4""",
    )
    flags.add_model_flag(parser)
    for short, long, default, what in (
        ("-p", "--n-prompt", "512", "tokens of a prompt; 0: none"),
        ("-n", "--n-gen", "128", "tokens to generate; 0: none"),
        ("-d", "--n-depth", "0", "tokens that are already in the cache"),
        ("-b", "--batch", "1", "sequences computed together"),
    ):
        parser.add_argument(short, long, default=default, metavar="N,..", help=f"{what} (default: %(default)s)")
    step = "maximum tokens computed in one step (default: %(default)s)"
    options = ("-ub", "--max-batch-tokens", "--ubatch-size")
    parser.add_argument(*options, type=int, metavar="N", default=512, help=step)
    times = "measure N times and report the median (default: %(default)s)"
    parser.add_argument("-r", "--repetitions", type=int, metavar="N", default=3, help=times)
    fill = "fill the cache with this text (default: random token ids)"
    parser.add_argument("-f", "--file", metavar="FILE", help=fill)
    flags.add_compute_flags(parser)
    add_json_flag(parser)
    group = parser.add_argument_group("cache")
    strategies = f"cache strategies: {', '.join(NAMES)} (default: auto)"
    group.add_argument("--cache", type=flags.Names(NAMES), default="auto", metavar="A,..", help=strategies)
    cells = f"number types of stored keys and values: {', '.join(CODECS)}, or K/V as in int8/bf16 (default: bf16)"
    group.add_argument("--cache-type", type=flags.Names(cache_types()), default="bf16", metavar="X,..", help=cells)
    flags.add_block_flags(group)
    group = parser.add_argument_group("comparison", "another engine; its repetitions alternate with those of kvarn")
    peers = "an OpenAI-compatible server, or llama.cpp, or a table of speeds measured before (docs/performance.md)"
    group.add_argument("--against", metavar="URL|llama-cpp-python|FILE.json", help=peers)
    group.add_argument(
        "--against-python", metavar="PATH", help="Python interpreter with llama-cpp-python (or KVARN_PEER_PYTHON)"
    )


def run(args: argparse.Namespace) -> None:
    flags.at_least(1, window=args.window)
    flags.at_least(0, pinned=args.pinned)
    chosen, setups = cases_of(args), setups_of(args)
    suite.check(chosen, setups, args.repetitions)
    text = None if args.file is None else flags.read_text(args.file)
    measured = Measured(Bandwidth(args.threads or default_threads()))
    try:
        with ProgressLine() as line:
            collect(measured, args, chosen, setups, text, line)
    except KeyboardInterrupt:
        end_line()
        raise Interrupted from None
    finally:  # also after Ctrl-C or a failure of the peer: show what was measured
        model = Path(args.model).name if Path(args.model).exists() else args.model
        machine = facts(measured.bandwidth)
        if measured.rows and args.json:
            print_json({"model": model, "rows": measured.rows, "backend": measured.backend, "machine": machine})
        elif measured.rows:
            show(model, measured.rows, measured.backend, machine)


@dataclass
class Measured:
    bandwidth: Bandwidth
    rows: list[suite.Row] = field(default_factory=list)
    backend: dict[str, str] = field(default_factory=dict)  # its facts


def collect(
    measured: Measured,
    args: argparse.Namespace,
    chosen: Sequence[Case],
    setups: Sequence[Setup],
    text: str | None,
    line: ProgressLine,
) -> None:
    chunk, bandwidth = args.max_batch_tokens, measured.bandwidth
    llm = LLM(  # the model's own cache is not used: each setup brings one
        args.model,
        cache_type=flags.rarest(args.cache_type),
        cache_layout=args.cache_layout,
        context=32,
        max_seqs=1,
        max_batch_tokens=chunk,
        threads=args.threads,
        backend=args.backend,
        progress=line,
    )
    measured.backend, bandwidth.on_host = llm.opened.facts, "device" not in llm.opened.facts
    tokens = None if text is None else llm.tokenizer.encode(text)
    vocabulary = llm.config.vocab_size
    recorded, against = None, args.against
    if against is not None and against.endswith(".json"):
        device = llm.opened.facts.get("device") or cpu_name()
        recorded, against = Recorded(Path(against), llm.config, main_type(llm.path), device), None
    with connect(against, args.against_python, args.model, vocabulary, bandwidth.threads, chunk, chosen) as peer:
        for row in suite.run(llm, setups, chosen, args.repetitions, bandwidth, tokens, peer, recorded, line):
            measured.rows.append(row)  # one by one, so that an interruption loses none


def cases_of(args: argparse.Namespace) -> list[Case]:
    return cases(
        numbers(args.n_prompt, "-p", 0),
        numbers(args.n_gen, "-n", 0),
        numbers(args.n_depth, "-d", 0),
        numbers(args.batch, "-b", 1),
    )


def setups_of(args: argparse.Namespace) -> list[Setup]:
    return [
        Setup(cache, codec, args.cache_layout, args.block_size, args.window, args.pinned, args.max_batch_tokens)
        for cache, codec in product(args.cache, args.cache_type)
    ]


def numbers(text: str, flag: str, least: int) -> list[int]:
    """'0,1024' -> [0, 1024], without repeats."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{flag} is {shown(text)!r}; give whole numbers with commas between them, as in 0,1024"
        ) from None
    if min(found) < least:
        raise KvarnError(f"{flag} {min(found)}: it must be at least {least}")
    return list(dict.fromkeys(found))


def show(
    model: str, rows: Sequence[Mapping[str, Any]], backend: Mapping[str, str], machine: Mapping[str, object]
) -> None:
    threads = counted(int(str(machine["threads"])), "thread")
    where = backend["device"] if "device" in backend else f"{threads}, {machine['isa']}, {machine['cpu']}"
    print(f"{printable(model)}, {where}\n")
    header = ["test", "cache", "type", "depth", "batch", "tok/s", "spread", "MB/token", "GB/s", "of memory"]
    lines = [line_of(row) for row in rows]
    against = [row.get("against") for row in rows]
    if any(against):
        header += ["peer tok/s", "spread", "times", "peer's setting"]
        for line, peer in zip(lines, against, strict=True):
            line += peer_cells(peer)
    print_table(header, lines, left=3, key=5)
    if any(against):
        print(f"\npeer: {', '.join(dict.fromkeys(peer['engine'] for peer in against if peer))}")


def peer_cells(peer: Mapping[str, Any] | None) -> list[str]:
    if peer is None:  # a recorded table need not have every case
        return ["-"] * 4
    spread = percent(peer["spread"]) if len(peer.get("samples", ())) > 1 else "-"
    return [f"{peer['tok_s']:,.1f}", spread, f"{peer['ratio']:.2f}", peer["setting"]]


def line_of(row: Mapping[str, Any]) -> list[str]:
    strategy = row["cache"] if row["cache"] == row["strategy"] else f"{row['cache']} -> {row['strategy']}"
    return [
        row["test"],
        strategy,
        row["cache_type"],
        str(row["depth"]),
        str(row["batch"]),
        f"{row['tok_s']:,.1f}",
        percent(row["spread"]) if len(row["samples"]) > 1 else "-",
        f"{row['bytes_per_token'] / 1e6:.1f}",
        f"{row['gb_s']:.1f}",
        "-" if row["bandwidth_share"] is None else percent(row["bandwidth_share"]),
    ]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
