"""`kvarn bench serve`: load for a server that speaks OpenAI's protocol, and what it did under it."""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from kvarn.bench.load.client import Outcome, Target
from kvarn.bench.load.report import parse_goal, summarize
from kvarn.bench.load.traffic import Traffic
from kvarn.cli.table import print_table
from kvarn.errors import KvarnError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("KVARN_API_KEY"), help="its key, if it wants one")
    parser.add_argument("--model", help="name in the requests (default: the first that the server lists)")
    parser.add_argument("--requests", type=int, default=64, help="how many (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="arrivals per second, at random (default: all at once)")
    parser.add_argument("--concurrency", type=int, help="most under way at once (default: any number)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--shared-prefix-len", type=int, default=0, help="prompt tokens that all share (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same traffic (%(default)s)")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="MEASURE:MS", help="as in ttft:500 tpot:50")
    parser.add_argument("--text", action="store_true", help="send words, not token ids")
    parser.add_argument("--stop-at-eos", action="store_true", help="do not send ignore_eos, which is an extension")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    goal = parse_goal(args.goodput)
    traffic = Traffic(
        requests=args.requests,
        rate=args.rate,
        concurrency=args.concurrency,
        input_len=args.input_len,
        output_len=args.output_len,
        shared_prefix_len=args.shared_prefix_len,
        seed=args.seed,
        as_text=args.text,
        ignore_eos=not args.stop_at_eos,
    )
    report = summarize(asyncio.run(play(args, traffic)), goal)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    if not report["completed"]:
        raise KvarnError("no request was completed: " + ", ".join(report["errors"]))


async def play(args: argparse.Namespace, traffic: Traffic) -> list[Outcome]:
    target = Target(args.url, args.api_key)
    model = args.model or (await target.models())[0]
    done = 0
    watched = sys.stderr.isatty()

    def progress(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if watched:
            end = "\r" if done < traffic.requests else "\r\033[K"
            print(f"{done} of {traffic.requests} answered", end=end, file=sys.stderr, flush=True)

    return await traffic.play(target, model, progress)


def show(report: dict[str, Any]) -> None:
    errors = "".join(f"; {n} x {error}" for error, n in report["errors"].items())
    print(f"requests    {report['completed']} of {report['requests']} in {report['seconds']:.2f} s{errors}")
    cached, prompt = report["cached_tokens"], report["prompt_tokens"]
    print(f"tokens      {prompt:,} of prompts ({cached:,} cached), {report['output_tokens']:,} of answers")
    rates = (report[f"{what}_per_second"] for what in ("requests", "output_tokens", "total_tokens"))
    print("throughput  {:.2f} requests/s, {:.1f} output tokens/s, {:.1f} tokens/s".format(*rates))
    if goodput := report.get("goodput"):
        goal = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["goal_ms"].items())
        print(
            f"goodput     {goodput['requests_per_second']:.2f} requests/s, {100 * goodput['share']:.0f} % within {goal}"
        )
    names = {"ttft": "first token", "tpot": "per token", "itl": "between pieces", "e2e": "whole answer"}
    rows = []
    for name, words in names.items():
        if spread := report[f"{name}_ms"]:
            rows.append((f"{words} ({name})", *(f"{spread[key]:.1f}" for key in ("mean", "median", "p99", "max"))))
    print()
    print_table(("milliseconds", "mean", "median", "p99", "max"), rows)
