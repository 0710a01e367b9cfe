"""What the cache says about itself: a snapshot of its blocks, and the count of what prompts found in it.

One prompt is one query, however often it is tried before there is room for it. Tokens are counted, misses by reason.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.cache.placement import Adoption, Reason


@dataclass(frozen=True, slots=True)
class Usage:
    """A snapshot. Blocks are summed over groups; prefix figures count tokens, misses count prompts."""

    sequences: int
    tokens: int  # of all sequences, those that share each counting their own
    tokens_resident: int  # tokens in place, cached ones included, each once
    nbytes: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    blocks_evicted: int
    prefix_queries: int
    prefix_hits: int
    prefix_misses: dict[Reason, int]


class GroupMap(NamedTuple):
    """Where everything of one group lies: enough to draw it."""

    layers: tuple[int, ...]
    block_size: int
    n_blocks: int
    cached: list[tuple[int, int]]  # block, tokens in it; the first to be evicted stands first
    sequences: dict[int, list[tuple[int, int]]]  # by sequence: block, position of its first token


class Query(NamedTuple):
    """What a prompt asked for and got. It can be taken back until something of the prompt is computed."""

    tokens: int
    found: Adoption


class PrefixCount:
    def __init__(self) -> None:
        self.queries = self.hits = 0
        self.misses: Counter[Reason] = Counter()

    def add(self, query: Query) -> None:
        self._move(query, 1)

    def take_back(self, query: Query) -> None:
        self._move(query, -1)

    def _move(self, query: Query, sign: int) -> None:
        self.queries += sign * query.tokens
        self.hits += sign * query.found.reused
        if query.found.limit.reason not in (Reason.END, Reason.NEW):  # nothing known was left unused
            self.misses[query.found.limit.reason] += sign
