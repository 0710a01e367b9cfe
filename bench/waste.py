"""Measures the unused cells by block size, and the number of sequences that a cache holds.

Sequences of random length (log-normal: many short chats, some long documents) arrive until the cache is
full. Waste is the share of allocated slots that hold no token. The baseline is contiguous slabs with the
same number of bytes.

    python bench/waste.py [--json]
"""

import argparse
import json
import random
import statistics

from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

CONTEXT = 4096
SPEC = LayerSpec(n_heads=32, n_kv_heads=4, k_dim=1, v_dim=1)  # TinyLlama's heads; no cell is used
BYTES_PER_TOKEN = 2 * 4 * 2
TOKENS = (8_192, 32_768, 131_072)  # size of the cache in tokens
TRIALS = 5


def lengths(rng: random.Random) -> int:
    return max(16, min(CONTEXT, int(rng.lognormvariate(6.0, 1.0))))  # median about 400 tokens


def fill(block_size: int | None, tokens: int, seed: int) -> tuple[int, float]:
    """(sequences held, waste) when the first sequence does not fit."""
    rng = random.Random(seed)
    strategy = "contiguous" if block_size is None else "paged"
    config = CacheConfig(
        layers=[SPEC],
        context=CONTEXT,
        strategy=strategy,
        codec="bf16",
        block_size=block_size,
        max_seqs=1024,
        max_chunk=CONTEXT,
        cache_bytes=tokens * BYTES_PER_TOKEN,
    )
    cache = KVCache(plan(config))
    held = used = 0
    while held < 1024:
        n = lengths(rng)
        cache.open(held)
        if not cache.reserve(held, n):
            break
        held, used = held + 1, used + n
    usage = cache.usage()
    allocated = usage.blocks_used * cache.plan.groups[0].config.block_size
    return held, 1 - used / allocated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = []
    for tokens in TOKENS:
        for block_size in (16, 32, 64, 128, None):
            trials = [fill(block_size, tokens, seed) for seed in range(TRIALS)]
            rows.append(
                {
                    "tokens": tokens,
                    "block_size": block_size or CONTEXT,
                    "blocks": tokens // (block_size or CONTEXT),
                    "sequences": statistics.median(held for held, _ in trials),
                    "waste_percent": 100 * statistics.median(waste for _, waste in trials),
                }
            )
    if as_json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    print("\nwaste by block size and number of blocks, sequences of about 400 tokens (published anchor: under 4 %)")
    print(f"{'budget (tokens)':>16}{'block size':>12}{'blocks':>8}{'sequences held':>16}{'waste':>9}")
    for row in rows:
        size = f"{row['block_size']}" if row["block_size"] != CONTEXT else "slab"
        print(
            f"{row['tokens']:>16,}{size:>12}{row['blocks']:>8,}{row['sequences']:>16.0f}{row['waste_percent']:>8.1f} %"
        )


if __name__ == "__main__":
    main()
