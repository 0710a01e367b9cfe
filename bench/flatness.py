"""Measures how the time of a decoded token grows with the context: only by the bytes that it reads.

The measurement and the line through it are in kvarn.bench.flatness.

    python bench/flatness.py [-m smollm2] [-d 0,512,...] [--cache-type bf16] [-t 2] [--out FILE]
"""

import argparse
import json
import sys
from pathlib import Path

from kvarn.backends.pool import default_threads
from kvarn.bench.flatness import fit, measure
from kvarn.bench.machine import Bandwidth, facts
from kvarn.bench.subject import Setup
from kvarn.cli.bench import numbers
from kvarn.cli.table import print_table
from kvarn.errors import KvarnError
from kvarn.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-d", "--depths", default="0,512,1024,2048,3072,4096,6144,8000")
    parser.add_argument("-n", type=int, default=64, help="tokens per repetition")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--cache", default="paged")
    parser.add_argument("--cache-type", default="bf16")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args()
    depths = sorted(numbers(args.depths, "-d", 0))
    if len(depths) < 2:
        parser.error("a line needs two depths")
    bandwidth = Bandwidth(args.threads or default_threads())
    llm = LLM(args.model, context=32, max_seqs=1, threads=args.threads, backend="cpu")
    points = measure(llm, Setup(args.cache, args.cache_type), depths, args.n, args.repetitions)
    line = fit(points, bandwidth.at, llm.config.n_layers, llm.config.n_heads)
    if args.out:
        result = {"model": args.model, "cache": args.cache, "cache_type": args.cache_type}
        result |= {"points": points, "fit": line, "machine": facts(bandwidth)}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{args.model}, {args.cache} {args.cache_type}, {bandwidth.threads} threads\n")
    header = ("depth", "ms/token", "spread", "MB/token", "GB/s", "Python")
    print_table(header, [describe(point) for point in points], left=0)
    print(
        f"\nslope {line['slope_ns_per_byte']:.4f} ns/byte ({line['slope_gb_s']:.1f} GB/s), "
        f"intercept {line['intercept_ms']:.2f} ms, R2 {line['r_squared']:.4f}\n"
        f"from depth {depths[0]} to {depths[-1]}: {line['growth_ms']:.2f} ms more; reading those bytes at the measured "
        f"bandwidth takes {line['growth_at_read_bandwidth_ms']:.2f} ms ({line['growth_over_bandwidth']:.2f}x)\n"
        f"attention at {depths[-1]}: {line['attention_us_per_layer_and_head_at_deepest']:.2f} us per layer and head\n"
        f"Python's share of a step: {100 * line['python_share']:.1f} % (target: below 5 %)"
    )


def describe(point: dict[str, float]) -> list[str]:
    return [
        str(point["depth"]),
        f"{point['ms_per_token']:.2f}",
        f"{100 * point['spread']:.0f} %",
        f"{point['bytes_per_token'] / 1e6:.1f}",
        f"{point['bytes_per_token'] / point['ms_per_token'] / 1e6:.1f}",
        f"{100 * point['python_share']:.1f} %",
    ]


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
