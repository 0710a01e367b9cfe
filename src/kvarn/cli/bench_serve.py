"""`kvarn bench serve`: sends load to a server with OpenAI's API and reports its speed."""

import argparse
import asyncio
import itertools
from typing import Any

from kvarn.bench.load.client import Outcome, Target
from kvarn.bench.load.report import parse_goal, summarize
from kvarn.bench.load.traffic import Traffic
from kvarn.cli.manual import add_json_flag, add_server_flags, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json, print_table
from kvarn.errors import KvarnError


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Send requests to a server with OpenAI's API. Report throughput, latency (first token, per token,
between pieces, whole answer) and goodput: the requests that stay within given limits.""",
        """
kvarn bench serve --requests 200 --rate 8 --input-len 512 --output-len 128
kvarn bench serve --shared-prefix-len 256 --goodput ttft:500 tpot:50 --json""",
    )
    add_server_flags(parser)
    parser.add_argument("--model", help="the model's name in requests (default: the first that the server lists)")
    for flag, default, what in (
        ("--requests", 64, "how many requests to send"),
        ("--input-len", 128, "tokens of a prompt"),
        ("--output-len", 64, "tokens of an answer"),
        ("--shared-prefix-len", 0, "common tokens at the start of all prompts"),
        ("--seed", 0, "the same seed gives the same traffic"),
    ):
        parser.add_argument(flag, type=int, metavar="N", default=default, help=f"{what} (default: %(default)s)")
    rate = "requests per second, sent at random times (default: all at once)"
    parser.add_argument("--rate", type=float, metavar="N", help=rate)
    most = "maximum requests at the same time (default: no limit)"
    parser.add_argument("--concurrency", type=int, metavar="N", help=most)
    limits = "limits for goodput in milliseconds, for ttft, tpot and e2e; e.g. ttft:500 tpot:50"
    parser.add_argument("--goodput", nargs="+", default=[], metavar="MEASURE:MS", help=limits)
    parser.add_argument("--text", action="store_true", help="send prompts as text instead of token ids")
    stop = "answers may end early: do not send ignore_eos, which some servers refuse"
    parser.add_argument("--stop-at-eos", action="store_true", help=stop)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    try:
        goal = parse_goal(args.goodput)
    except KvarnError as error:
        raise UsageError(str(error)) from None
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
    target = Target(args.url, args.api_key)
    model = args.model or target.models()[0]
    report = summarize(play(target, model, traffic), goal)
    if args.json:
        print_json(report)
    else:
        show(report)
    if not report["completed"]:
        raise KvarnError("no request was completed: " + ", ".join(report["errors"]))


def play(target: Target, model: str, traffic: Traffic) -> list[Outcome]:
    with ProgressLine() as line:
        answered = itertools.count(1)
        return asyncio.run(
            traffic.play(target, model, lambda _: line(f"{next(answered)} of {traffic.requests} answered"))
        )


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
