"""Measures the write of one token at positions 1, 1,000 and 4,000: equal bytes, and equal time within noise.

One decode step of one layer (SmolLM2's heads, bf16) on the reference backend. The three lengths are
measured alternately.

    python bench/write.py [--json]
"""

import argparse
import json
import statistics
import time

import numpy as np

from kvarn.backends.host import HostMemory
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

SPEC = LayerSpec(9, 3, 64, 64)
LENGTHS = (1, 1000, 4000)
ROUNDS = 300


def prepared(strategy: str, length: int) -> HostMemory:
    """Memory in which a step that writes token number `length` was applied."""
    window = 512 if STRATEGIES[strategy].windowed else None
    planned = plan(CacheConfig([SPEC], 4096, strategy, "bf16", window=window))
    cache, memory = KVCache(planned), Reference().memory(planned)
    cache.open(0)
    while (start := cache.length(0)) < length - 1:
        n = min(512, length - 1 - start)
        cache.reserve(0, start + n)
        memory.apply(cache.prepare([0]))
        cache.advance(0, n)
        cache.commit(0, range(start, start + n))
    cache.reserve(0, length)
    memory.apply(cache.prepare([0]))
    return memory


def measure(strategy: str) -> dict[str, list[float]]:
    memories = [prepared(strategy, length) for length in LENGTHS]
    k = np.ones((1, SPEC.n_kv_heads, SPEC.k_dim), np.float32)
    times: list[list[float]] = [[] for _ in LENGTHS]
    for _ in range(ROUNDS):
        for memory, us in zip(memories, times, strict=True):
            start = time.perf_counter()
            memory.write(0, k, k)
            us.append((time.perf_counter() - start) * 1e6)
    written = [memory.counters.written / ROUNDS for memory in memories]
    return {"bytes": written, "us": [statistics.median(us) for us in times]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = {strategy: measure(strategy) for strategy in STRATEGIES}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print("\nthe write of one token, one layer: bytes, and microseconds at token 1, 1,000 and 4,000")
    print(f"{'cache':<12}{'bytes':>8}{'@ 1':>8}{'@ 1000':>8}{'@ 4000':>8}")
    for strategy, row in rows.items():
        assert len(set(row["bytes"])) == 1
        print(f"{strategy:<12}{row['bytes'][0]:>8.0f}" + "".join(f"{us:>8.1f}" for us in row["us"]))


if __name__ == "__main__":
    main()
