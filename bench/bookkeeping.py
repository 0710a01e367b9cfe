"""Measures the bookkeeping of a decode step, and that its time does not depend on the context length.

256 sequences, one token each: reserve, prepare, apply (the host's tables), advance, commit; no kernels.
Two context lengths are measured alternately. A round is as many steps as a block has slots, so every
alignment counts equally. The result is the median of the rounds.

    python bench/bookkeeping.py [--json]
"""

import argparse
import gc
import json
import statistics
import time
from typing import NamedTuple

from kvarn.backends.host import HostMemory
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

SEQUENCES = 256
BLOCK = 32
SHORT, LONG = 128, 8192
ROUNDS = 9
TARGET_RATIO, TARGET_US = 1.2, 5.0

SPEC = LayerSpec(9, 3, k_dim=1, v_dim=1)  # no kernel reads the cells, so small heads save memory
GEMMA = [LayerSpec(4, 1, 1, 1, window=512)] * 5 + [LayerSpec(4, 1, 1, 1)]
CASES = {
    "contiguous": dict(layers=[SPEC], strategy="contiguous"),
    "ring": dict(layers=[SPEC], strategy="ring", window=64),
    "sliding": dict(layers=[SPEC], strategy="sliding", window=64),
    "sinks": dict(layers=[SPEC], strategy="sinks", window=64, pinned=4),
    "paged": dict(layers=[SPEC], strategy="paged"),
    "paged, 2 groups": dict(layers=GEMMA, strategy="paged"),
}


class Caching(NamedTuple):
    cache: KVCache
    memory: HostMemory
    seqs: list[int]


def grown(case: dict, length: int) -> Caching:
    """A cache whose sequences all have `length` tokens. No two sequences have equal tokens."""
    config = CacheConfig(context=LONG + 2 * BLOCK * ROUNDS, max_seqs=SEQUENCES, codec="bf16", **case)
    planned = plan(config)
    cache, memory, seqs = KVCache(planned), Reference().memory(planned), list(range(SEQUENCES))
    for seq in seqs:
        cache.open(seq)
    done = 0
    while done < length:
        n = min(512, length - done)
        for seq in seqs:
            assert cache.reserve(seq, done + n)
        memory.apply(cache.prepare(seqs))
        for seq in seqs:
            cache.advance(seq, n)
            cache.commit(seq, [(seq * 7919 + t) % 50000 for t in range(done, done + n)])
        done += n
    return Caching(cache, memory, seqs)


def steps(caching: Caching, n: int) -> float:
    """Microseconds per sequence and step over n decode steps."""
    cache, memory, seqs = caching
    start = time.perf_counter()
    for _ in range(n):
        length = cache.length(0) + 1
        for seq in seqs:
            cache.reserve(seq, length)
        step = cache.prepare(seqs)
        memory.apply(step)
        cache.launched(step)
        for seq in seqs:
            cache.commit(seq, (length,))
    return (time.perf_counter() - start) * 1e6 / (n * len(seqs))


def measure(case: dict) -> dict:
    caches = {length: grown(case, length) for length in (SHORT, LONG)}
    times: dict[int, list[float]] = {SHORT: [], LONG: []}
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        for length, caching in caches.items():
            times[length].append(steps(caching, BLOCK))
    gc.unfreeze()
    short, long = (statistics.median(times[length]) for length in (SHORT, LONG))
    ratio = statistics.median(b / a for a, b in zip(times[SHORT], times[LONG], strict=True))
    return {"us_at_128": short, "us_at_8192": long, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    if not as_json:
        print(f"bookkeeping of a decode step, {SEQUENCES} sequences; microseconds per sequence and step")
        header = f"{'cache':<18}{'@ 128':>8}{'@ 8192':>8}{'ratio':>8}"
        print(f"{header}   target: ratio <= {TARGET_RATIO}, aim {TARGET_US:.0f} us")
    rows = {}
    for name, case in CASES.items():
        rows[name] = row = measure(case)
        if not as_json:
            verdict = "pass" if row["ratio"] <= TARGET_RATIO else "FAIL"
            aim = "" if row["us_at_8192"] <= TARGET_US else ", above the aim"
            figures = f"{row['us_at_128']:>8.2f}{row['us_at_8192']:>8.2f}{row['ratio']:>8.2f}"
            print(f"{name:<18}{figures}   {verdict}{aim}", flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
