"""Random specs, tables and lengths through every instruction set: `make fuzz-attention [SEED=n] [CASES=n]`.

Each case must come near the oracle on the best instruction set; all others must give the same bits, and so must
another layout, block size, number of threads and cut into steps, with every cell NaN before. A case that fails is named
by its seed: `--seed S --cases 1` repeats it alone.
"""

import argparse
import random
import sys
import time
import traceback
from dataclasses import dataclass, replace

import numpy as np
from support.harness import (
    Driven,
    Schedule,
    assert_near,
    bits,
    drive,
    expect,
    fill_with_nan,
    moved,
    pool,
    using,
    workload,
)

from kvarn import native
from kvarn.backends.base import Counters
from kvarn.backends.cpu import Cpu
from kvarn.cache.codec import CODECS, codecs_of
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError

DIMS = (48, 64, 80, 96, 128, 256, 5, 24, 40, 1, 2, 16, 33, 112)
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513)
SLOW = 260  # tokens of a sequence that the portable kernels are given, and no more


@dataclass(frozen=True)
class Case:
    config: CacheConfig
    schedule: Schedule
    other: CacheConfig  # the same cells in another order
    whole: Schedule  # each sequence in one piece
    threads: int
    order: str

    @property
    def longest(self) -> int:
        return max(n for batch in self.whole for n in batch.values())


def valid(config: CacheConfig) -> bool:
    try:
        plan(config)
    except KvarnError:
        return False
    return True


def make(seed: int, most: int = 513) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.randint(1, 4)
    window = rng.choice([None, None, rng.randint(1, 300)])
    pinned = rng.choice([0, 0, rng.randint(1, 80)]) if window else 0
    dim = rng.choice(DIMS)
    spec = LayerSpec(kv_heads * rng.randint(1, 16), kv_heads, dim, dim, window, pinned)
    lengths = {
        seq: min(most, rng.choice(EDGES) if rng.random() < 0.5 else rng.randint(1, 600))
        for seq in range(rng.choice([1, 1, 2, 3, 5]))
    }
    schedule = steps(lengths, rng)
    chunk = max(n for batch in schedule for n in batch.values())

    def config(strategy: str, largest: int) -> CacheConfig:
        while True:
            made = CacheConfig(
                [spec],
                context=max(*lengths.values(), pinned + 1),  # pinned tokens must fit
                strategy=strategy,
                codec="/".join(rng.choices(list(CODECS), k=rng.choice([1, 2]))),
                layout=rng.choice([*LAYOUTS, None]),
                block_size=rng.choice([16, 32, 64]),
                max_chunk=largest,
                max_seqs=len(lengths),
                window=window,
                pinned=pinned,
            )
            if valid(made):
                return made

    kinds = ["contiguous", "paged"] + (["ring", "sliding"] if window and not pinned else ["sinks"] if pinned else [])
    first = config(rng.choice(kinds), chunk)
    second = config(rng.choice(["contiguous", "paged"]), max(lengths.values()))
    whole = [{seq: n} for seq, n in lengths.items()]
    size = max(second.block_size or 0, codecs_of(first.codec).tail)
    second = replace(second, codec=first.codec, block_size=size)
    return Case(first, schedule, second, whole, rng.choice([1, 2, 3]), rng.choice(native.SUM_ORDERS))


def steps(lengths: dict[int, int], rng: random.Random) -> Schedule:
    left, found = dict(lengths), []
    while left:
        batch = {}
        for seq in rng.sample(sorted(left), rng.randint(1, len(left))):
            n = 1 if rng.random() < 0.4 and left[seq] < 40 else rng.randint(1, min(left[seq], 200))
            batch[seq] = n
            left[seq] -= n
        found.append(batch)
        left = {seq: n for seq, n in left.items() if n}
    return found


def run(config: CacheConfig, schedule: Schedule, data: dict, threads: int) -> tuple[dict, Counters]:
    cache = Driven(config, Cpu(pool(threads)))
    fill_with_nan(cache)
    return drive(cache, schedule, data), cache.counters


def check(case: Case, seed: int) -> int:
    """Returns the rows that were compared."""
    data = workload(case.config, case.schedule, seed)
    best, *others = native.isas()
    with using(best, case.order):
        output, counters = run(case.config, case.schedule, data, 2)
        for key, x in data.items():
            assert_near(output[key], expect(x, case.config.layers[0], case.config.codec), key)
        again, _ = run(case.other, case.whole, data, case.threads)
        for key in data:
            assert (bits(again[key]) == bits(output[key])).all(), ("another layout and cut", key)
    for name in others:
        if name == "portable" and case.longest > SLOW:
            continue
        with using(name, case.order):
            again, counted = run(case.config, case.schedule, data, case.threads)
        assert moved(counted) == moved(counters), name
        for key in data:
            assert (bits(again[key]) == bits(output[key])).all(), (name, key)
    return sum(len(x.q) for x in data.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200)
    args = parser.parse_args()
    start, rows = time.monotonic(), 0
    for seed in range(args.seed, args.seed + args.cases):
        case = make(seed)
        try:
            rows += check(case, seed)
        except Exception:  # noqa: BLE001 - whatever it was, the seed must be printed
            traceback.print_exc()
            print(f"\nFAILED: --seed {seed} --cases 1\n{case}", file=sys.stderr)
            return 1
    print(f"{args.cases} cases, {rows:,} rows, {', '.join(native.isas())}: clean, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
