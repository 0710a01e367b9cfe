"""Measures the time from the start of the process until `kvarn run` writes its first byte.

python bench/start.py [-r 9] [MODEL ...]        the first run of each model warms the disk cache and is not counted
"""

import argparse
import statistics
import subprocess
import sys
import time

from kvarn.cli.table import print_table

MAIN = "import sys; from kvarn.cli import main; sys.exit(main())"


def first_byte(model: str, backend: str = "auto") -> float:
    options = ["--backend", backend, "-p", "The quick brown fox", "-n", "8"]
    command = [sys.executable, "-c", MAIN, "run", "-m", model, *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            sys.exit(f"{model}: {process.communicate()[1].decode().strip() or 'it wrote nothing'}")
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("-r", "--repetitions", type=int, default=9)
    args = parser.parse_args()
    lines = []
    for model in args.models:
        times = [first_byte(model) for _ in range(args.repetitions + 1)][1:]
        lines.append([model, *(f"{x:.2f} s" for x in (statistics.median(times), min(times), max(times)))])
    print_table(("model", "median", "least", "most"), lines)


if __name__ == "__main__":
    main()
