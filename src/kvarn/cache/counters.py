"""Counters of bytes moved, kernels called and their time. They are incremented where the bytes move, nowhere else."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    written: int = 0  # into cells, by attention's write
    read: int = 0  # out of cells, by the attention kernels
    copied: int = 0  # from cells to cells: copy-on-write, and a fork of what cannot be shared
    calls: Counter[str] = field(default_factory=Counter)  # by kernel
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kernel
