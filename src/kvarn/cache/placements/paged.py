"""Paged: a sequence takes blocks from a pool, one at a time. Sequences with equal prefixes share blocks.

A block in the prefix tree (prefix.py) is never written again. A sequence that must write into such a
block, or into a shared block, copies it first. A block that matches only in part is reused the same
way: the sequence shares it, and copies the matching slots when it writes its next token.

With a window, `commit` releases the blocks that no later query can see. They can be reused until the
pool needs them for new content.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.blocks import BlockPool
from kvarn.cache.cover import covered, needed
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.journal import NOWHERE, TreeJournal
from kvarn.cache.placement import Placement
from kvarn.cache.prefix import ChainHash, Node, PagedResidency, PrefixTree, chain_hash, root_hash
from kvarn.cache.shelf import Shelf
from kvarn.cache.spec import ceil_div
from kvarn.cache.step import Copy
from kvarn.cache.tier import Spill
from kvarn.errors import BrokenInvariant, OutOfBlocks

WORDS = 24  # tokens of the earlier text in ReuseLimit.onward: enough to say why the texts differ


class Paged(Placement[PagedResidency]):
    shares = True
    on_demand = True

    def __init__(
        self, config: GroupConfig, digest: ChainHash = chain_hash, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(config)
        self.tree = PrefixTree(self.block_size, max(config.n_blocks, 256), digest, clock)
        self.pool = BlockPool(config.n_blocks, self.tree.holds, self._evicted, config.watermarks, clock)
        self.shelf = Shelf(config, self.tree, self.pool)

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

    def _evicted(self, block: int) -> None:
        self.shelf.tell(block)
        self.tree.detach(block)

    def journal(self) -> TreeJournal:
        return TreeJournal(self.sequences, self.pool, self.tree)

    def leaf(self, tokens: Sequence[int], salt: bytes) -> int:
        root = self.tree.known_root(salt)
        last = None if root is None else deque(self.tree.walk(root, tokens), maxlen=1)
        return last[0].serial if last else NOWHERE

    def content(self, block: int, salt: bytes) -> tuple[int, ...]:
        root = root_hash(salt)
        if (node := self.tree.node_of(block)) is not None:
            return node.tokens if node.root.hash == root else ()
        tails = (tuple(r.tail) for r in self.sequences.values() if r.tail_block == block and r.node.root.hash == root)
        return next(tails, ())

    # -- sharing -------------------------------------------------------------------------------------------------

    def match(self, seq: int, tokens: Sequence[int], limit: int) -> Adoption:
        root = self.residency(seq).node
        path = list(self.tree.walk(root, tokens))
        n_full = len(path) * self.block_size
        node = path[-1] if path else root
        have, most = [node.block is not None for node in path], min(n_full, limit)
        if n_full < limit:
            most += self.tree.partial(node, tokens[n_full:limit]).n  # copying one token is cheaper than computing it
            have.append(True)
        reused = covered(have, most, self.config)  # with the last tokens: a window may begin after a lost block then
        if reused < most:
            lost = path[reused // self.block_size]
            return Adoption(reused, ReuseLimit(lost.why, n_full, when=lost.when))
        if reused < limit:
            return Adoption(reused, self._limit(node, tokens, n_full, reused))
        return Adoption(reused, ReuseLimit(Reason.END, reused))

    def _limit(self, node: Node, tokens: Sequence[int], n_full: int, reused: int) -> ReuseLimit:
        """Why only `reused` tokens are reused. `n_full` tokens matched in full blocks; `node` is the last of them."""
        ours = tokens[n_full:]
        n, theirs, _, near = self.tree.nearest(node, ours)
        at = n_full + n
        if near is not None and reused < at:
            return ReuseLimit(near.why, at, when=near.when)
        if n < min(len(ours), len(theirs)) and at:
            return ReuseLimit(Reason.DIFFERS, at, ours[n], theirs[n], self._onward(near, tuple(theirs[n:])))
        return ReuseLimit(Reason.NEW if at else Reason.NOTHING_SHARED, at)

    @staticmethod
    def _onward(node: Node | None, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The first WORDS tokens of an earlier text, from the next blocks too if they are in the tree."""
        while node is not None and len(tokens) < WORDS and node.children:
            node = node.children[0]
            tokens += node.tokens
        return tokens[:WORDS]

    def _take(self, r: PagedResidency, tokens: Sequence[int], reused: int) -> None:
        size = self.block_size
        path = list(self.tree.walk(r.node, tokens[: ceil_div(reused, size) * size]))
        blocks = [node.block for node in path]
        if reused > len(path) * size:
            last = path[-1] if path else r.node
            blocks.append(self.tree.partial(last, tokens[len(path) * size : reused]).block)
            for other in last.growing:
                other.writable = 0  # the shared block may be the one it writes next: it must copy first
        for node in path:
            node.wanted = True
        for logical in needed(reused, self.config):
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

    def lacks(self, length: int) -> int:
        needed = min(ceil_div(length, self.block_size), self.blocks_per_sequence(self.config))
        return max(needed - self.pool.available, 0)

    # -- a step --------------------------------------------------------------------------------------------------

    def _fresh(self, r: PagedResidency, length: int) -> int:
        return max(ceil_div(length, self.block_size) - r.end, 0)

    def _half_full(self, r: PagedResidency) -> int | None:
        """Entry of the block for the next token, if that block already holds earlier tokens."""
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
        """Make a half-full block safe to write. Copy it if another sequence shares it or if the tree has it. If only
        the tree has it and there is no free block for the copy, remove it from the tree instead."""
        block = r.blocks[entry]
        if self.pool.references[block] > 1 or (self.tree.holds(block) and spare > 0):
            fresh = self.pool.take()
            self._copies.append(Copy(block, fresh, r.length % self.block_size))
            r.replace(entry, fresh)
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
            self.pool.touched(r.blocks[entry])
            if node.block is not None and node.block != r.blocks[entry]:
                self._replace(r, entry, node.block)  # another sequence computed the same block before: keep that one
            used += size
        self._move(r, node, r.tail[used:])

    def _replace(self, r: PagedResidency, entry: int, block: int) -> None:
        self._share(block)
        self.pool.release(r.blocks[entry])
        r.replace(entry, block)

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

    # -- rewind, fork, free ----------------------------------------------------------------------------------------

    def _intact_from(self, r: PagedResidency, end: int) -> int:
        pinned = self.config.pinned_blocks
        return r.firsts[pinned] // self.block_size if pinned < len(r.firsts) else r.end

    def _rewound(self, r: PagedResidency, length: int) -> None:
        self._give_back(r.remove(bisect_left(r.firsts, length), len(r.blocks)))
        r.end = ceil_div(length, self.block_size)
        self._move(r, *self._content(r, length))

    def _content(self, r: PagedResidency, length: int) -> tuple[Node, list[int]]:
        """The last full block of its first `length` tokens, and the tokens after it."""
        node, tail = r.node, r.tail
        while node.depth > length // self.block_size:
            tail = list(node.tokens)
            assert node.parent is not None
            node = node.parent
        return node, tail[: length - node.depth * self.block_size]

    def _forked(self, source: PagedResidency, length: int) -> PagedResidency:
        node, tail = self._content(source, length)
        child = PagedResidency(node, source.priority)
        child.tail = tail
        child.committed = child.length = child.reserved = length
        for block, first in zip(source.blocks, source.firsts, strict=True):
            if first < length:
                self._share(block)
                child.end = first // self.block_size
                child.append(block, self.block_size)
        child.end = ceil_div(length, self.block_size)
        child.node.growing[child] = None
        source.writable = 0
        return child

    def _new(self, salt: bytes, priority: int) -> PagedResidency:
        r = PagedResidency(self.tree.root(salt), priority)
        r.node.growing[r] = None
        return r

    def _released(self, r: PagedResidency) -> None:
        self.shelf.let_go(r)
        if r.priority:
            self.shelf.want(r.blocks)
        tail = r.tail_block
        unshared = tail is not None and self.pool.references[tail] == 1 and not self.tree.holds(tail)
        self.tree.end(r, r.node, tail if unshared and len(r.tail) >= self.config.tile else None)
        self._give_back(r.blocks, r.priority)

    def discard(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.tree.holds(block):
                self.tree.detach(block)
                self.pool.discard(block)

    def _give_back(self, blocks: list[int], priority: int = 0) -> None:
        """Release the last block first, so that the tail of a sequence is evicted before its head."""
        for block in reversed(blocks):
            self.pool.release(block, priority)

    def spill_to(self, group: int, spill: Spill) -> None:
        self.shelf.spill_to(group, spill)

    def adopt(self, seq: int, tokens: Sequence[int], limit: int | None = None) -> Adoption:
        adoption = super().adopt(seq, tokens, limit)
        self.shelf.let_go(self.residency(seq))
        return adoption

    def _check_pool(self) -> None:
        self.pool.check()
        self.tree.check()
        references = [0] * self.pool.n_blocks
        for r in self.sequences.values():
            for block in (*r.blocks, *r.held):
                references[block] += 1
        if references != self.pool.references:
            raise BrokenInvariant("Paged: references and the sequences' blocks differ")
        for seq, r in self.sequences.items():
            if r.node.depth * self.block_size + len(r.tail) != r.committed or r not in r.node.growing:
                raise BrokenInvariant(f"Paged: sequence {seq} has lost count of its content")
