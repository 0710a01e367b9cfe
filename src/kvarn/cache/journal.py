"""What changed in a cache since somebody last looked: the blocks of one group, each as it is now.

A journal exists only while somebody watches (`KVCache.watch`). Its cost grows with the changes, not with the
cache: the pool names the blocks that it gives, shares and takes back, and only the newest blocks of live
sequences are looked at each time. The first `take` reports every block.

Two kinds: `Journal` for placements in which each sequence holds blocks of its own, `TreeJournal` for those with
a pool and a prefix tree. Integers only: who may see the text of a block is for others to decide (`root`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvarn.cache.blocks import BlockPool
from kvarn.cache.prefix import Node, PagedResidency, PrefixTree
from kvarn.cache.residency import Residency

NEXT = 8  # blocks that are named as the next to be evicted
NOWHERE = -1  # the number of a node that there is not


class BlockNow(NamedTuple):
    """
    references  sequences that hold it; 0: kept for reuse
    tokens      in it
    position    of its first slot
    branch      the conversation that it belongs to: texts get a number of their own where they part from others
    node, parent    numbers in the prefix tree, of this block and the one before it, or NOWHERE
    used        when the last sequence left it, in seconds of the pool's clock; 0 while it is held
    root        names the salt of its text
    """

    references: int
    tokens: int
    position: int
    branch: int
    node: int
    parent: int
    used: float
    root: bytes


class GroupChanges(NamedTuple):
    """
    blocks      the changed ones; None: free
    leaves      of each sequence: the node of its last full block, or NOWHERE
    next        blocks, in the order in which they will be evicted: the first few
    """

    blocks: dict[int, BlockNow | None]
    leaves: dict[int, int]
    next: list[int]


class Changes(NamedTuple):
    """Of all groups, and the counts of `Usage` that cost nothing to read. Misses by the name of their reason."""

    groups: list[GroupChanges]
    evicted: int
    queries: int
    hits: int
    misses: dict[str, int]


class Journal:
    def __init__(self, sequences: Mapping[int, Residency], block_size: int, n_blocks: int) -> None:
        self._sequences = sequences
        self._block_size = block_size
        self._last: dict[int, BlockNow | None] = dict.fromkeys(range(n_blocks))
        self._first = True

    def close(self) -> None:
        """Nobody watches any longer."""

    def take(self) -> GroupChanges:
        now: dict[int, BlockNow | None] = dict.fromkeys(self._last)
        for seq, r in self._sequences.items():
            for block, first in zip(r.blocks, r.firsts, strict=True):
                filled = max(min(r.length - first, self._block_size), 0)
                now[block] = BlockNow(1, filled, first, seq, NOWHERE, NOWHERE, 0.0, b"")
        before, self._last = self._last, now
        first, self._first = self._first, False
        changed = {block: each for block, each in now.items() if first or each != before[block]}
        return GroupChanges(changed, dict.fromkeys(self._sequences, NOWHERE), [])


class TreeJournal:
    def __init__(self, sequences: Mapping[int, PagedResidency], pool: BlockPool, tree: PrefixTree) -> None:
        self._sequences = sequences
        self._pool = pool
        self._tree = tree
        self._changed = set(range(pool.n_blocks))
        pool.touched = self._changed.add

    def close(self) -> None:
        self._pool.unwatch()

    def take(self) -> GroupChanges:
        changed, self._changed = self._changed, set()
        self._pool.touched = self._changed.add
        blocks: dict[int, BlockNow | None] = {block: self._now(block) for block in changed}
        for r in self._sequences.values():
            self._add_tail(r, blocks)
        leaves = {seq: r.node.serial for seq, r in self._sequences.items()}
        return GroupChanges(blocks, leaves, self._pool.next_evicted(NEXT))

    def _now(self, block: int) -> BlockNow | None:
        node, references = self._tree.node_of(block), self._pool.references[block]
        if node is None or node.parent is None:  # free, or it is in a tail
            return None
        used = 0.0 if references else self._pool.used[block]
        position = (node.depth - 1) * self._tree.block_size
        parent = node.parent.serial if node.parent.parent else NOWHERE
        return BlockNow(references, len(node.tokens), position, node.branch, node.serial, parent, used, node.root.hash)

    def _add_tail(self, r: PagedResidency, blocks: dict[int, BlockNow | None]) -> None:
        """The blocks after the sequence's last full one. Other sequences may hold them, but the tree may not know
        them yet."""
        size, node = self._tree.block_size, r.node
        full = node.depth * size
        for block, first in zip(reversed(r.blocks), reversed(r.firsts), strict=True):
            if first < full:
                return
            blocks[block] = self._now(block) or BlockNow(
                self._pool.references[block],
                max(min(r.length - first, size), 0),
                first,
                branch_of(node, r.tail),
                NOWHERE,
                node.serial if node.parent else NOWHERE,
                0.0,
                node.root.hash,
            )


def branch_of(node: Node, tail: list[int]) -> int:
    """The branch of a text that goes on after `node`: the block will have it when it is full."""
    if node.parent is not None and (not tail or node.branch_for(tuple(tail)) is None):
        return node.branch
    found = node.branch_for(tuple(tail))
    return NOWHERE if found is None else found
