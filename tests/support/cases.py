"""Many seeded cases in processes of their own: an exception, a signal, a hang or too much memory ends the run."""

import argparse
import json
import mmap
import os
import resource
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Attempt = Callable[[int, int], str]  # seed and number of the case -> what became of it


class Limits(NamedTuple):
    batch: int  # cases of one process
    seconds: int  # of one case
    memory: int = 1 << 30  # bytes of address space beyond what the process has at the start


def main(
    name: str, attempt: Attempt, limits: Limits, cases: int, about: str, arguments: list[str] | None = None
) -> int:
    """`--seed S --first N --cases 1` repeats case N alone."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    last = args.first + args.cases
    for first in range(args.first, last, limits.batch):
        found = _run_batch(attempt, limits, args.seed, range(first, min(first + limits.batch, last)))
        if found is None:
            return 1
        total += found
        print(f"{name}: {total.total()} of {args.cases} cases, {dict(sorted(total.items()))}", flush=True)
    return 0


def _run_batch(attempt: Attempt, limits: Limits, seed: int, numbers: range) -> Counter[str] | None:
    """None if a case failed; it is printed."""
    at = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(writer, json.dumps(_batch(attempt, limits, seed, numbers, at)).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 (also the PanicException of a library)
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return Counter(json.loads(said))
    (number,) = struct.unpack("<q", at[:8])
    print(f"FAILED: --seed {seed} --first {number} --cases 1 (status {status}, {limits.seconds} s at most)", flush=True)
    return None


def _batch(attempt: Attempt, limits: Limits, seed: int, numbers: range, at: mmap.mmap) -> Counter[str]:
    """In the child. `at` tells the parent which case runs."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + limits.memory, now + limits.memory))
    found: Counter[str] = Counter()
    for number in numbers:
        at[:8] = struct.pack("<q", number)
        signal.alarm(limits.seconds)
        found[attempt(seed, number)] += 1
    signal.alarm(0)
    return found
