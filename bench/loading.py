"""Measures the time to open GGUF files with kvarn and with the gguf package, and the speed of dequantization by type.

python bench/loading.py [FILE.gguf ...]        one core; the package's reader takes seconds per file
"""

import sys
import time
from collections.abc import Callable

import gguf
import numpy as np

from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.quants import READABLE, dequantize
from kvarn.text.tokenizer import Tokenizer

ROWS, COLUMNS, TYPES = 1024, 4096, sorted(READABLE, key=lambda name: (len(name), name))


def best(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    for path in sys.argv[1:]:
        ours, theirs = best(lambda: GGUFFile.open(path), 5), best(lambda: gguf.GGUFReader(path), 1)  # noqa: B023
        metadata = GGUFFile.open(path).metadata
        tokenizer = best(lambda: Tokenizer.from_gguf(metadata), 3)  # noqa: B023
        print(f"{path}: header {ours:.3f} s (gguf package {theirs:.2f} s), tokenizer {tokenizer:.3f} s")
    random = np.random.default_rng(0)
    print("type      stored MB/s  float32 MB/s")
    for name in TYPES:
        raw = random.integers(0, 256, ROWS * ENCODINGS[name].row_bytes(COLUMNS), dtype=np.uint8)
        seconds = best(lambda: dequantize(raw, name, (ROWS, COLUMNS)), 3)  # noqa: B023
        print(f"{name:8}  {raw.nbytes / seconds / 1e6:11.0f}  {4 * ROWS * COLUMNS / seconds / 1e6:12.0f}")


if __name__ == "__main__":
    main()
