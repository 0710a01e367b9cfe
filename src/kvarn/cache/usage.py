"""Figures about the cache: the use of its blocks, and the hits and misses of prompts.

One prompt counts as one query, even if it is looked up several times before there is room for it.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.cache.adoption import NOT_FETCHED, Adoption, Fetched, Reason

REUSED = (Reason.END, Reason.NEW, Reason.TILE)  # with these, all that can be reused was: no miss


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks are summed over groups. Queries and hits count tokens, misses count prompts."""

    sequences: int
    tokens: int  # sum over sequences: a shared token counts once per sequence
    tokens_resident: int  # tokens in blocks, live or cached: a shared token counts once
    nbytes: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    blocks_evicted: int
    prefix_queries: int
    prefix_hits: int
    prefix_misses: dict[Reason, int]
    external_queries: int = 0  # with tiers: tokens that the cache did not have itself
    external_hits: int = 0  # those of them that tiers gave


class GroupMap(NamedTuple):
    """The content of every block of one group."""

    layers: tuple[int, ...]
    block_size: int
    n_blocks: int
    cached: list[tuple[int, int]]  # (block, tokens in it), in order of eviction
    sequences: dict[int, list[tuple[int, int]]]  # by sequence: (block, position of its slot 0)


class Query(NamedTuple):
    """One prompt's lookup and its result."""

    tokens: int
    adoption: Adoption
    fetched: Fetched = NOT_FETCHED


class PrefixCount:
    def __init__(self) -> None:
        self.queries = self.hits = self.external_queries = self.external_hits = 0
        self.misses: Counter[Reason] = Counter()

    def add(self, query: Query) -> None:
        self._move(query, 1)

    def take_back(self, query: Query) -> None:
        self._move(query, -1)

    def _move(self, query: Query, sign: int) -> None:
        local = query.adoption.reused - query.fetched.tokens
        self.queries += sign * query.tokens
        self.hits += sign * local
        if query.fetched.asked:
            self.external_queries += sign * (query.tokens - local)
            self.external_hits += sign * query.fetched.tokens
        reason = query.adoption.limit.reason
        if reason not in REUSED:
            self.misses[reason] += sign
