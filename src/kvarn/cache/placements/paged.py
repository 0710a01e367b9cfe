"""Paged: blocks from a pool, one at a time; equal prefixes share them.

Blocks that are known by content (prefix.py) never change: a sequence that must write into one, or into a block that
somebody shares, gets a copy first. That is also how a block that matches only in part is reused: it is shared, and
copied up to there when the sequence goes on. Under a window, blocks that no query can see any more go back to the pool
at commit, where they stay reusable until their place is needed.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from kvarn.cache.blocks import BlockPool
from kvarn.cache.placement import Adoption, GroupConfig, Placement, Reason, ReuseLimit
from kvarn.cache.prefix import ChainHash, Node, PrefixTree, chain_hash
from kvarn.cache.residency import Residency
from kvarn.cache.spec import ceil_div
from kvarn.cache.step import Copy
from kvarn.errors import BrokenInvariant, OutOfBlocks

WORDS = 8  # tokens of an earlier text that are quoted where ours differs from it


class PagedResidency(Residency):
    __slots__ = ("node", "priority", "tail")

    def __init__(self, node: Node, priority: int = 0) -> None:
        super().__init__()
        self.node = node  # the last full block, or the root
        self.priority = priority
        self.tail: list[int] = []  # committed tokens behind it

    @property
    def tail_block(self) -> int | None:
        return self.blocks[self.index(self.node.depth)] if self.tail else None


def resident(path: Sequence[Node], length: int, config: GroupConfig) -> int:
    """The longest length <= `length` of which every block that the next query sees is resident.

    A block that is missing ends the reuse before it; then the blocks before that are needed, down to its window."""
    size = config.block_size
    for logical, node in enumerate(path[: config.pinned_blocks]):
        if node.block is None:
            length = min(length, logical * size)
    logical = ceil_div(length, size) - 1
    while logical >= max(config.spec.floor(length) // size, 0):
        if path[logical].block is None:
            length = logical * size
        logical -= 1
    return length


class Paged(Placement[PagedResidency]):
    shares = True

    def __init__(
        self, config: GroupConfig, digest: ChainHash = chain_hash, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(config)
        self.tree = PrefixTree(self.block_size, max(config.n_blocks, 256), digest, clock)
        self.pool = BlockPool(config.n_blocks, self.tree.holds, self.tree.detach, config.watermarks)

    @staticmethod
    def blocks_per_sequence(config: GroupConfig) -> int:
        return config.pinned_blocks + config.window_blocks

    @property
    def n_used(self) -> int:
        return self.pool.n_live

    @property
    def n_cached(self) -> int:
        return self.pool.n_cached

    @property
    def n_evicted(self) -> int:
        return self.pool.n_evicted

    @property
    def cached_blocks(self) -> list[tuple[int, int]]:
        nodes = ((block, self.tree.node_of(block)) for block in self.pool.cached)
        return [(block, len(node.tokens)) for block, node in nodes if node is not None]

    # -- sharing -------------------------------------------------------------------------------------------------

    def match(self, seq: int, tokens: Sequence[int], limit: int) -> Adoption:
        root = self.residency(seq).node
        path = list(self.tree.walk(root, tokens))
        known = len(path) * self.block_size
        reused = resident(path, min(known, limit), self.config)
        if reused < min(known, limit):
            lost = path[reused // self.block_size]
            return Adoption(reused, ReuseLimit(lost.why, known, when=lost.when))
        node = path[-1] if path else root
        if known < limit:
            reused += self.tree.partial(node, tokens[known:limit]).n  # a copy is cheaper from the first token on
        if reused < limit:
            return Adoption(reused, self._limit(node, tokens, known, reused))
        return Adoption(reused, ReuseLimit(Reason.END, reused))

    def _limit(self, node: Node, tokens: Sequence[int], known: int, reused: int) -> ReuseLimit:
        """Why no more than `reused` tokens: `known` of them in full blocks, and what follows those."""
        ours = tokens[known:]
        n, theirs, _, near = self.tree.nearest(node, ours)
        at = known + n
        if near is not None and reused < at:
            return ReuseLimit(near.why, at, when=near.when)
        if n < min(len(ours), len(theirs)) and at:
            return ReuseLimit(Reason.DIFFERS, at, ours[n], theirs[n], self._onward(near, tuple(theirs[n:])))
        return ReuseLimit(Reason.NEW if at else Reason.NOTHING_SHARED, at)

    @staticmethod
    def _onward(node: Node | None, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A few tokens of an earlier text, into the next block if there is one."""
        if node is not None and len(tokens) < WORDS and node.children:
            tokens += node.children[0].tokens
        return tokens[:WORDS]

    def _take(self, r: PagedResidency, tokens: Sequence[int], reused: int) -> None:
        size = self.block_size
        path = list(self.tree.walk(r.node, tokens[: ceil_div(reused, size) * size]))
        blocks = [node.block for node in path]
        if reused > len(path) * size:
            last = path[-1] if path else r.node
            blocks.append(self.tree.partial(last, tokens[len(path) * size : reused]).block)
            for other in last.growing:
                other.writable = 0  # the block may be its own unfilled one, which is shared now
        lowest = max(self.spec.floor(reused) // size, 0)
        pinned = range(min(self.config.pinned_blocks, lowest))
        for logical in (*pinned, *range(lowest, len(blocks))):
            block = blocks[logical]
            assert block is not None
            self._share(block)
            r.end = logical
            r.append(block, size)
        r.end = ceil_div(reused, size)
        full = reused // size
        self._move(r, path[full - 1] if full else r.node, list(tokens[full * size : reused]))

    def _move(self, r: PagedResidency, node: Node, tail: list[int]) -> None:
        old, r.node, r.tail = r.node, node, tail
        self.tree.grow(r, old, node)

    # -- a step --------------------------------------------------------------------------------------------------

    def _fresh(self, r: PagedResidency, length: int) -> int:
        return max(ceil_div(length, self.block_size) - r.end, 0)

    def _half_full(self, r: PagedResidency) -> int | None:
        """Entry of the block that the next token goes into, if earlier tokens are in it."""
        return r.index(r.length // self.block_size) if r.length % self.block_size else None

    def _shortfall(self, r: PagedResidency, length: int) -> int:
        fresh = self._fresh(r, length)
        if len(r.blocks) + fresh > self.pool.n_blocks:
            raise OutOfBlocks(
                f"{length} tokens need {len(r.blocks) + fresh} blocks of {self.block_size} at once and the cache has "
                f"{self.pool.n_blocks}: shorten the sequence or enlarge the cache"
            )
        entry = self._half_full(r)
        copied = entry is not None and self.pool.references[r.blocks[entry]] > 1
        return max(fresh + copied - self.pool.available, 0)

    def _extend(self, r: PagedResidency, length: int) -> None:
        entry = self._half_full(r)
        if entry is not None:
            self._own(r, entry, spare=self.pool.available - self._fresh(r, length))
        for _ in range(self._fresh(r, length)):
            r.append(self.pool.take(), self.block_size)
        r.writable = min(r.end * self.block_size, self.config.context)

    def _own(self, r: PagedResidency, entry: int, spare: int) -> None:
        """Make a half-full block safe to write: copy it if it is shared or known by content. Where it is only known
        and no block is left for a copy, its content becomes unknown instead."""
        block = r.blocks[entry]
        if self.pool.references[block] > 1 or (self.tree.holds(block) and spare > 0):
            mine = self.pool.take()
            self._copies.append(Copy(block, mine, r.length % self.block_size))
            r.replace(entry, mine)
            self.pool.release(block)
        elif self.tree.holds(block):
            self.tree.detach(block)

    def _committed(self, r: PagedResidency, tokens: Sequence[int]) -> None:
        r.tail.extend(tokens)
        if len(r.tail) >= self.block_size:
            self._register(r)
        if self.spec.window is not None:
            self._drop(r)

    def _register(self, r: PagedResidency) -> None:
        size, node, used = self.block_size, r.node, 0
        while used + size <= len(r.tail):
            entry = r.index(node.depth)
            node = self.tree.insert(node, tuple(r.tail[used : used + size]), r.blocks[entry])
            if node.block is not None and node.block != r.blocks[entry]:
                self._replace(r, entry, node.block)  # somebody computed the same bits before: keep one of the two
            used += size
        self._move(r, node, r.tail[used:])

    def _replace(self, r: PagedResidency, entry: int, known: int) -> None:
        self._share(known)
        self.pool.release(r.blocks[entry])
        r.replace(entry, known)

    def _share(self, block: int) -> None:
        self.pool.share(block)
        if node := self.tree.node_of(block):
            node.why = Reason.EVICTED

    def _drop(self, r: PagedResidency) -> None:
        dead = self._dead_blocks(r)
        for block in r.remove(dead.start, dead.stop) if dead else ():
            if node := self.tree.node_of(block):
                node.why = Reason.OUT_OF_WINDOW
            self.pool.release(block)

    # -- going back, branching, leaving ----------------------------------------------------------------------------

    def _intact_from(self, r: PagedResidency, end: int) -> int:
        pinned = self.config.pinned_blocks
        return r.firsts[pinned] // self.block_size if pinned < len(r.firsts) else r.end

    def _rewound(self, r: PagedResidency, length: int) -> None:
        size = self.block_size
        self._give_back(r.remove(bisect_left(r.firsts, length), len(r.blocks)))
        r.end = ceil_div(length, size)
        node, tail = r.node, r.tail
        while node.depth > length // size:
            tail = list(node.tokens)
            assert node.parent is not None
            node = node.parent
        self._move(r, node, tail[: length - node.depth * size])

    def _forked(self, source: PagedResidency) -> PagedResidency:
        child = PagedResidency(source.node, source.priority)
        child.tail = list(source.tail)
        child.committed = child.length = child.reserved = source.length
        for block, first in zip(source.blocks, source.firsts, strict=True):
            if first < source.length:
                self._share(block)
                child.end = first // self.block_size
                child.append(block, self.block_size)
        child.end = ceil_div(source.length, self.block_size)
        child.node.growing[child] = None
        source.writable = 0
        return child

    def _new(self, salt: bytes, priority: int) -> PagedResidency:
        r = PagedResidency(self.tree.root(salt), priority)
        r.node.growing[r] = None
        return r

    def _released(self, r: PagedResidency) -> None:
        tail = r.tail_block
        mine = tail is not None and self.pool.references[tail] == 1 and not self.tree.holds(tail)
        self.tree.end(r, r.node, tail if mine else None)
        self._give_back(r.blocks, r.priority)

    def discard(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.tree.holds(block):
                self.tree.detach(block)
                self.pool.discard(block)

    def _give_back(self, blocks: list[int], priority: int = 0) -> None:
        """Last block first, so that a sequence's tail is evicted before its head."""
        for block in reversed(blocks):
            self.pool.release(block, priority)

    def _check_pool(self) -> None:
        self.pool.check()
        self.tree.check()
        counted = [0] * self.pool.n_blocks
        for r in self.sequences.values():
            for block in r.blocks:
                counted[block] += 1
        if counted != self.pool.references:
            raise BrokenInvariant("Paged: references and the sequences' blocks differ")
        for seq, r in self.sequences.items():
            if r.node.depth * self.block_size + len(r.tail) != r.committed or r not in r.node.growing:
                raise BrokenInvariant(f"Paged: sequence {seq} has lost count of its content")
