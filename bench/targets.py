"""Compares the measured speed on two cores with kvarn's targets.

The runs, the targets and the verdicts are in kvarn.bench.targets. The raw JSON contains the command of each
run. Two environment variables name Python interpreters with llama-cpp-python: KVARN_PEER_PYTHON (built for
AVX-512) and KVARN_PEER_PYTHON_AVX2. Without them, ratios are not measured.

    python bench/targets.py [--out FILE] [--only WORD] [-r 5]
"""

import argparse
import json
import sys
from pathlib import Path

from kvarn.bench.targets import RUNS, TARGETS, aim, execute, verdicts
from kvarn.cli.table import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the raw JSON of the runs here")
    parser.add_argument("--only", choices=[run.name for run in RUNS], action="append", help="(repeatable)")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    args = parser.parse_args()
    chosen = [run for run in RUNS if not args.only or run.name in args.only]
    results = {}
    for run in chosen:
        print(f"{run.name}: kvarn bench {run.flags}", file=sys.stderr, flush=True)
        results[run.name] = execute(run, args.repetitions)
        if args.out:  # write after each run, so that an interrupted session keeps its results
            args.out.write_text(json.dumps({"runs": results}, indent=1) + "\n", encoding="utf-8")
    lines = [line for target in TARGETS if target.run in results for line in verdicts(target, results[target.run])]
    if "deep" in results:
        lines.append(aim(results["deep"]))
    print_table(("target", "at least", "measured", "verdict"), lines)


if __name__ == "__main__":
    main()
