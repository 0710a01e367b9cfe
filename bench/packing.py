"""Measures how fast weights are packed for a GPU, and their scales found, in GB of a file per second. Needs no GPU.

Types and numbers of threads are measured alternately; figures are medians.

    python bench/packing.py [-r ROUNDS] [-t THREADS ...]
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvarn import native
from kvarn.backends.cuda.planes import GROUP, PACKED, peak
from kvarn.loading.encodings import ENCODINGS

ROWS, WIDTH = 256, 4096  # of a thread
CALLS = 20


def prepared(type_name: str) -> tuple[int, dict[str, Callable[[], object]]]:
    """Random bytes: their number, and what is done with them."""
    planes = PACKED[type_name]
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, ENCODINGS[type_name].row_bytes(WIDTH)), np.uint8)
    units = planes.units(WIDTH)
    codes = np.zeros((ROWS // GROUP, units, planes.tiles, GROUP, planes.span), np.uint16)
    headers = np.zeros((units, planes.words, WIDTH), np.uint32)
    return rows.nbytes, {
        "pack": lambda: native.pack_planes(type_name, rows, 0, codes, 0, headers, 0),
        "scales": lambda: peak(rows, type_name),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-r", "--rounds", type=int, default=15)
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    speeds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    own = {type_name: [prepared(type_name) for _ in range(max(args.threads))] for type_name in PACKED}
    with ThreadPoolExecutor(max(args.threads)) as pool:
        for _ in range(args.rounds):
            for type_name, threads in ((name, n) for name in PACKED for n in args.threads):
                for what in ("pack", "scales"):
                    calls = [each[what] for _, each in own[type_name][:threads]]
                    start = time.perf_counter()
                    list(pool.map(lambda call: [call() for _ in range(CALLS)], calls))
                    nbytes = threads * CALLS * own[type_name][0][0]
                    speeds[type_name, what, threads].append(nbytes / (time.perf_counter() - start) / 1e9)
    for (type_name, what, threads), found in speeds.items():
        print(f"{type_name} {what:6} {threads:2} threads {statistics.median(found):6.2f} GB/s")


if __name__ == "__main__":
    main()
