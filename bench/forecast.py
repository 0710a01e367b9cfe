"""Forecasts beside the truth: memory, decode speed and time to the first token of some models at some depths.

    python bench/forecast.py MODEL.gguf[:DEPTH,..] ... [-t N] [--fresh] [--out FILE.json]

Each model is planned, loaded and measured in a process of its own (`kvarn plan --check`). The targets are those of
docs/plan.md: memory within 2 %, decode within 15 % (the median over all models and depths). The machine should be
quiet: `load` is the number of processors that other processes used meanwhile.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvarn import __version__
from kvarn.cli.table import print_table

MEMORY, DECODE = 0.02, 0.15


def busy_seconds() -> float:
    """CPU time of all processes since the machine started."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def checked(model: str, depths: str, context: int, options: list[str]) -> dict[str, Any]:
    words = ["plan", model, "--depth", depths, "-c", str(context), "--check", "--json", *options]
    before, own, start = busy_seconds(), own_seconds(), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "kvarn", *words], stdout=subprocess.PIPE, text=True, check=True)
    other = busy_seconds() - before - (own_seconds() - own)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts | {"other_load": round(other / (time.monotonic() - start), 3)}  # processors that others used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("-t", "--threads")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, help="a file with results; those of other models stay in it")
    args = parser.parse_args()
    options = [*(["-t", args.threads] if args.threads else []), *(["--fresh"] if args.fresh else [])]
    kept = json.loads(args.out.read_text())["models"] if args.out and args.out.exists() else []
    found = {each["model"]: each for each in kept}
    for each in args.models:
        model, _, depths = each.partition(":")
        depths = depths or "0,1024,4096"
        context = max(map(int, depths.split(","))) + 32
        found[Path(model).name] = slim(checked(model, depths, context, options))
    results = list(found.values())
    print_rows(results)
    memory = [abs(each["check"]["memory_bytes"]["error_share"]) for each in results]
    decode = [abs(row["tok_s"]["error_share"]) for each in results for row in each["check"]["depths"]]
    worst, median = max(memory), statistics.median(decode)
    print(f"\nmemory: at most {100 * worst:.1f} % (target {100 * MEMORY:.0f} %)")
    print(f"decode: median {100 * median:.1f} % (target {100 * DECODE:.0f} %), at most {100 * max(decode):.1f} %")
    if args.out:
        kept = {"kvarn": __version__, "memory_worst": worst, "decode_median": median, "models": results}
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(worst > MEMORY or median > DECODE)


def slim(facts: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "cpu", "backend", "threads", "read_gb_s", "other_load", "memory", "check")
    return {"model": Path(facts["model"]).name, **{key: facts[key] for key in keys}}


def print_rows(found: list[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        name, check = Path(facts["model"]).name[:24], facts["check"]
        pair = check["memory_bytes"]
        numbers = (f"{pair[key] / 1e6:,.1f}" for key in ("forecast", "truth"))
        rows.append((name, f"memory, MB (load {facts['other_load']:.2f})", *numbers, error(pair)))
        for row in check["depths"]:
            for what, key in (("tokens/s", "tok_s"), ("first token, s", "first_token_seconds")):
                pair = row[key]
                numbers = (f"{pair[which]:,.2f}" for which in ("forecast", "truth"))
                rows.append((name, f"{what} at {row['depth']:,}", *numbers, error(pair)))
    print_table(("model", "", "forecast", "truth", "error"), rows, left=2)


def error(pair: dict[str, float]) -> str:
    return f"{100 * pair['error_share']:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
