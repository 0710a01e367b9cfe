"""Measures how the time of a decoded token grows with the context: only by the bytes that it reads.

It fits a line to time per token over bytes read per token (weights and cells). The slope is the time per
byte. The intercept is the time per token that does not depend on bytes. It also reports Python's share of
a step (all time outside the program's call), and attention's time per layer and head (the time of a step
minus that of a step at depth 0).

    python bench/flatness.py [-m smollm2] [-d 0,512,...] [--cache-type bf16] [-t 2] [--out FILE]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.backends.pool import default_threads
from kvarn.bench.case import Case
from kvarn.bench.ids import RandomIds
from kvarn.bench.machine import Bandwidth, facts
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.cli.bench import numbers
from kvarn.cli.table import print_table
from kvarn.errors import KvarnError
from kvarn.llm import LLM


class Timed:
    """A program that measures the total time of its calls."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def run(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._program.run(*args)
        finally:
            self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def measure(llm: LLM, setup: Setup, depths: list[int], n: int, repetitions: int) -> list[dict[str, float]]:
    program = Timed(llm.program)
    context = max(depths) + n + 1
    engine = build(llm, setup, context, 1, program)
    ours = EngineSubject(engine, 1, RandomIds(llm.config.vocab_size, context), llm.program.nbytes)
    points = []
    for depth in depths:
        case = Case("tg", n, depth)
        ours.prepare(case)
        times, shares, nbytes = [], [], 0.0
        for _ in range(repetitions):
            before = program.seconds
            reading = ours.measure(case)
            times.append(reading.seconds / reading.tokens)
            shares.append(1 - (program.seconds - before) / reading.seconds)
            nbytes = reading.nbytes / reading.tokens
        median = statistics.median(times)
        spread = (max(times) - min(times)) / median
        points.append(
            {
                "depth": depth,
                "ms_per_token": 1000 * median,
                "spread": spread,
                "bytes_per_token": nbytes,
                "python_share": statistics.median(shares),
            }
        )
    return points


def fit(points: list[dict[str, float]], bandwidth: Bandwidth, layers: int, heads: int) -> dict[str, float]:
    nbytes = np.array([point["bytes_per_token"] for point in points])
    ms = np.array([point["ms_per_token"] for point in points])
    slope, intercept = np.polyfit(nbytes, ms, 1)
    residual = ms - (slope * nbytes + intercept)
    grown_ms, grown_bytes = ms[-1] - ms[0], nbytes[-1] - nbytes[0]
    must = grown_bytes / bandwidth.at(int(nbytes[-1])) / 1e6  # ms
    return {
        "slope_ns_per_byte": slope * 1e6,
        "slope_gb_s": 1 / (slope * 1e6),
        "intercept_ms": intercept,
        "r_squared": 1 - float(residual @ residual) / float((ms - ms.mean()) @ (ms - ms.mean())),
        "growth_ms": grown_ms,
        "growth_at_read_bandwidth_ms": must,
        "growth_over_bandwidth": grown_ms / must,
        "attention_us_per_layer_and_head_at_deepest": 1000 * grown_ms / (layers * heads),
        "python_share": statistics.median(point["python_share"] for point in points),
    }


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
    llm = LLM(args.model, context=32, max_seqs=1, threads=args.threads)
    points = measure(llm, Setup(args.cache, args.cache_type), depths, args.n, args.repetitions)
    line = fit(points, bandwidth, llm.config.n_layers, llm.config.n_heads)
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
