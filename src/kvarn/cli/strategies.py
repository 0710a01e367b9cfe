"""`kvarn strategies`: runs the same random keys and values through every strategy and prints one table.

Each strategy runs a prefill in chunks, and then decodes, with the real cache and the kernels of the
backend. `max diff` is the largest difference from dense attention in float64 with the same mask. `bits`
says whether every bit of the output equals that of a contiguous cache with the same mask and codec,
prefilled at once.
"""

import argparse
from dataclasses import asdict, dataclass

import numpy as np

from kvarn.arrays import Floats
from kvarn.backends import check_memory
from kvarn.backends.base import Backend
from kvarn.backends.choice import Opening
from kvarn.backends.host_memory import memory_bytes
from kvarn.backends.reference import dense
from kvarn.cache.cache import KVCache
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import NAMES, STRATEGIES
from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import shown
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import human_bytes, print_json, print_table
from kvarn.errors import KvarnError

DECODED = 16  # tokens of the run that are decoded one by one, after the prefill


@dataclass(frozen=True)
class Row:
    strategy: str
    placement: str
    layout: str
    bytes: int
    blocks_used: int
    blocks: int
    bytes_written_per_step: int
    bytes_read_last_step: int
    max_difference: float
    same_bits: bool


@dataclass(frozen=True)
class Run:
    cache: KVCache
    output: Floats  # [T, n_heads, dim]
    written: int  # by the last decode step
    read: int


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Run the same random keys, values and queries through every cache strategy: prefill in chunks, then
decode. The table shows what each strategy allocates, writes and reads, its largest difference from
dense attention in float64 (max diff), and whether its bits equal those of a contiguous cache.""",
        """
kvarn strategies
kvarn strategies --cache ring --cache paged --cache-type int8 --window 64 -n 1000 -c 1024""",
    )
    for short, long, default, what in (
        ("-c", "--context", 512, "context length"),
        ("-n", "--tokens", 400, "tokens to run"),
        ("-b", "--chunk", 64, "maximum tokens of a prefill chunk"),
    ):
        parser.add_argument(short, long, type=int, metavar="N", default=default, help=f"{what} (default: %(default)s)")
    for long, default, what in (
        ("--head-dim", 64, "size of a head"),
        ("--window", 128, "window of ring, sliding and sinks"),
        ("--pinned", 4, "pinned tokens of sinks"),
        ("--seed", 1, "seed of the random data"),
    ):
        parser.add_argument(long, type=int, metavar="N", default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--heads",
        type=parse_heads,
        metavar="Q/KV",
        default="9/3",
        help="number of query heads and KV heads (default: %(default)s)",
    )
    parser.add_argument("--cache", choices=NAMES, action="append", help="run only this strategy; repeatable")
    flags.add_cache_type_flags(parser, "f32")
    layout = "order of the bytes in a block, for strategies that do not set it"
    parser.add_argument("--cache-layout", choices=tuple(LAYOUTS), help=layout)
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens per block: a power of two, at least 16")
    flags.add_compute_flags(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    if not DECODED < args.tokens <= args.context:
        raise KvarnError(f"--tokens {args.tokens}: it must be above {DECODED} and within the context of {args.context}")
    flags.at_least(1, window=args.window)
    n_heads, n_kv_heads = args.heads
    args.cache_type = flags.cache_type_of(args)
    spec = LayerSpec(n_heads, n_kv_heads, args.head_dim, args.head_dim)
    asked = CacheConfig([spec], args.context, codec=args.cache_type, layout=args.cache_layout)
    with ProgressLine() as line:
        backend, _ = Opening(args.backend, args.threads, line).finish(asked)
    wanted, host = 4 * args.tokens * args.head_dim * (spec.n_heads + 2 * spec.n_kv_heads), memory_bytes()
    if host is not None and wanted > host:
        raise KvarnError(f"the random data would take {human_bytes(wanted)}: lower -n, --heads or --head-dim")
    rng = np.random.default_rng(args.seed & (1 << 64) - 1)
    q, k, v = (
        rng.standard_normal((args.tokens, heads, spec.k_dim), dtype=np.float32)
        for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
    )
    rows = [compare(name, args, backend, spec, q, k, v) for name in args.cache or NAMES if applies(name, spec)]
    if args.json:
        facts = {"backend": backend.name, "rows": [asdict(row) for row in rows]}
        print_json(facts)
        return
    print(
        f"{args.tokens} tokens, {spec.n_heads} query and {spec.n_kv_heads} KV heads of {spec.k_dim}, one layer, "
        f"{args.cache_type} cells, {backend.name} backend,\n"
        f"context {args.context}, chunks of {args.chunk}, window {args.window} where the strategy has one\n"
    )
    header = ("strategy", "placement", "layout", "bytes", "blocks", "written/step", "read/step", "max diff", "bits")
    print_table(header, [line_of(row) for row in rows], left=3)


def parse_heads(text: str) -> tuple[int, int]:
    try:
        query, kv = (int(part) for part in text.split("/"))
    except ValueError:
        words = f"is {shown(text)!r}; give query heads / KV heads, as in 9/3"
        raise argparse.ArgumentTypeError(words) from None
    return query, kv


def applies(name: str, spec: LayerSpec) -> bool:
    return name != "repeated" or spec.group > 1


def compare(
    name: str, args: argparse.Namespace, backend: Backend, spec: LayerSpec, q: Floats, k: Floats, v: Floats
) -> Row:
    windowed = name in STRATEGIES and STRATEGIES[name].windowed
    layout = None if name in STRATEGIES and STRATEGIES[name].layout else args.cache_layout
    config = CacheConfig(
        layers=[spec],
        context=args.context,
        strategy=name,
        codec=args.cache_type,
        layout=layout,
        block_size=args.block_size,
        max_chunk=args.chunk,
        window=args.window if windowed else None,
        pinned=args.pinned if name == "sinks" else None,
    )
    ours = drive(config, backend, q, k, v)
    planned = ours.cache.plan
    seen = planned.groups[0].config.spec
    plain = CacheConfig(
        layers=[seen], context=args.context, strategy="contiguous", codec=args.cache_type, max_chunk=args.tokens
    )
    theirs = drive(plain, backend, q, k, v)
    exact = dense.attend(q, k, v, seen, spec.k_dim**-0.5)
    usage = ours.cache.usage()
    return Row(
        strategy=name if name in STRATEGIES else f"{name} -> {planned.strategy.name}",
        placement=planned.strategy.placement,
        layout=planned.layout.name,
        bytes=planned.nbytes,
        blocks_used=usage.blocks_used,
        blocks=usage.blocks,
        bytes_written_per_step=ours.written,
        bytes_read_last_step=ours.read,
        max_difference=float(np.abs(ours.output - exact).max()),
        same_bits=ours.output.tobytes() == theirs.output.tobytes(),
    )


def drive(config: CacheConfig, backend: Backend, q: Floats, k: Floats, v: Floats) -> Run:
    """Prefill in the largest chunks, then decode."""
    planned = plan(config, backend.default_layout)
    check_memory(planned, backend)
    cache, layers = KVCache(planned), backend.layers(planned)
    cache.open(0)
    output = np.empty_like(q)
    start = written = read = 0
    while start < len(q):
        prompt = len(q) - DECODED
        stop = min(start + config.max_chunk, prompt) if start < prompt else start + 1
        written, read = layers.counters.written, layers.counters.read
        cache.reserve(0, stop)
        layers.apply(cache.prepare([0]))
        layers.write(0, k[start:stop], v[start:stop])
        output[start:stop] = layers.attend(0, q[start:stop])
        cache.advance(0, stop - start)
        cache.commit(0, range(start, stop))
        start = stop
    cache.check()
    return Run(cache, output, layers.counters.written - written, layers.counters.read - read)


def line_of(row: Row) -> tuple[str, ...]:
    return (
        row.strategy,
        row.placement,
        row.layout,
        human_bytes(row.bytes),
        f"{row.blocks_used}/{row.blocks}",
        f"{row.bytes_written_per_step:,}",
        f"{row.bytes_read_last_step:,}",
        f"{row.max_difference:.1e}",
        "equal" if row.same_bits else "DIFFER",
    )
