"""Random operations on every cache configuration against the dictionary oracle: `make fuzz [SEED=n] [OPS=n]`.

Each configuration gets its share of the operations, in runs of 2,000 on a fresh cache, from a seed of its own that is
printed when the run fails; `--seed S --only NAME --ops 2000` then repeats that run alone.
"""

import argparse
import random
import sys
import time
import traceback

from support.book import CONFIGS, Book

RUN = 2000
CHECK_EVERY = 20


def operate(book: Book, rng: random.Random) -> None:
    live = list(book.texts)
    choice = rng.random()
    if not live or (choice < 0.08 and len(live) < book.config.max_seqs):
        seq = rng.randrange(10**6)
        if seq not in book.texts:
            book.open(seq, rng.choice([b"", b"a"]))
            if rng.random() < 0.8:
                tokens = prompt(book, rng)
                if rng.random() < 0.9:
                    book.recall(seq, tokens, rng.choice([0, 1, 2, 99, 99]))
                book.adopt(seq, tokens)
    elif choice < 0.72:
        batch = rng.sample(live, rng.randint(1, len(live)))
        tokens = {seq: more(book, seq, rng) for seq in batch if room(book, seq)}
        kind = rng.random()
        if kind < 0.07:
            book.abandon(tokens, prepare=rng.random() < 0.5)
        elif kind < 0.10:
            book.drop(tokens)
        else:
            later = book.config.ahead > 0 and rng.random() < 0.5
            book.step(tokens, keep=1.0 if rng.random() < 0.8 else rng.random(), commit=not later)
            for seq in [*book.texts] if rng.random() < 0.6 else []:
                book.commit(seq, keep=1.0 if rng.random() < 0.7 else rng.random())
    elif choice < 0.80:
        seq = rng.choice(live)
        book.rewind(seq, rng.randint(0, book.texts[seq].committed))
    elif choice < 0.86 and len(live) < book.config.max_seqs:
        child = rng.randrange(10**6)
        if child not in book.texts:
            book.fork(rng.choice(live), child)
    elif choice < 0.96:
        book.free(rng.choice(live))
    else:
        book.misuse(rng.choice(live))


def prompt(book: Book, rng: random.Random) -> list[int]:
    """Often the beginning of something seen before, then something else."""
    tokens: list[int] = []
    if book.texts and rng.random() < 0.7:
        other = rng.choice(list(book.texts.values())).tokens
        if book.ended and rng.random() < 0.6:
            other = rng.choice(book.ended)
        tokens = other[: rng.randint(0, len(other))]
    tokens = tokens + [rng.randrange(3) for _ in range(rng.randint(1, 40))]
    return tokens[: book.config.context]


def room(book: Book, seq: int) -> int:
    return book.config.context - len(book.texts[seq].tokens)


def more(book: Book, seq: int, rng: random.Random) -> list[int]:
    """A decode step mostly, a chunk sometimes. Three token values make equal prefixes common."""
    most = min(room(book, seq), book.config.max_chunk)
    n = 1 if rng.random() < 0.5 else rng.randint(1, most)
    return [rng.randrange(3) for _ in range(n)]


def run(name: str, seed: int, ops: int) -> Book:
    rng = random.Random(f"{name} {seed}")
    book = Book(CONFIGS[name])
    for op in range(ops):
        operate(book, rng)
        if op % CHECK_EVERY == 0:
            book.check()
    book.check()
    for seq in list(book.texts):
        book.free(seq)
    book.check()
    return book


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--only", choices=tuple(CONFIGS), help="one configuration")
    args = parser.parse_args()
    names = [args.only] if args.only else list(CONFIGS)
    start, done, seed, full, evicted, hits, planted = time.monotonic(), 0, args.seed, 0, 0, 0, 0
    while done < args.ops:
        for name in names:
            ops = min(RUN, args.ops - done)
            try:
                book = run(name, seed, ops)
            except Exception:  # noqa: BLE001 - whatever it was, the seed must be printed
                traceback.print_exc()
                print(f"\nFAILED: --only '{name}' --seed {seed} --ops {RUN}", file=sys.stderr)
                return 1
            usage = book.cache.usage()
            full, evicted, hits = full + book.full, evicted + usage.blocks_evicted, hits + usage.prefix_hits
            planted += book.planted
            done += ops
        seed += 1
        if sys.stderr.isatty():
            print(f"\r{done:,} of {args.ops:,} operations, {time.monotonic() - start:.0f} s ", end="", file=sys.stderr)
    print(
        f"{done:,} operations over {len(names)} configurations, seeds {args.seed} to {seed - 1}, "
        f"{time.monotonic() - start:.0f} s: clean\n"
        f"on the way: {full:,} times full, {evicted:,} evictions, {hits:,} tokens reused, {planted:,} blocks from tiers"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
