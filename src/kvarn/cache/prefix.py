"""The prefix tree: which block holds which tokens. There is one tree per salt.

A node holds the tokens of one block. Its parent holds the block before. A lookup uses a chained hash
(parent's hash, tokens) and then compares the tokens and the parent. A hash collision therefore costs
a miss and never gives a wrong result.

The block after a node can also match in part, by its first tokens. Such a block may be full or partly
filled, and its sequence may be live or finished.

A node stays for a while after its block was evicted. A miss can then report "evicted" or "differs at
token i". Non-goals: reference counts and the order of eviction (blocks.py).
"""

import itertools
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

from kvarn.cache.adoption import Reason
from kvarn.cache.residency import Residency
from kvarn.errors import BrokenInvariant

Tokens = tuple[int, ...]
ChainHash = Callable[[bytes, Tokens], bytes]
_serials = itertools.count()


def root_hash(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=16).digest()


def chain_hash(parent: bytes, tokens: Tokens) -> bytes:
    """The same in every process, so that processes can exchange blocks by name."""
    return blake2b(pack(f"<{len(tokens)}q", *tokens), key=parent, digest_size=16).digest()


class Node:
    __slots__ = (
        "block",
        "branch",
        "children",
        "depth",
        "growing",
        "hash",
        "parent",
        "root",
        "serial",
        "tokens",
        "wanted",
        "when",
        "why",
    )

    def __init__(self, parent: "Node | None", tokens: Tokens, digest: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = digest
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks from the root to here
        self.root: Node = self if parent is None else parent.root
        self.serial = next(_serials)
        found = None if parent is None else parent.branch_for(tokens)
        self.branch: int = self.serial if found is None else found  # the conversation, for those who watch
        self.block: int | None = None  # the physical block, while resident
        self.why = Reason.EVICTED  # why it left the cache; while resident, the reason to record at eviction
        self.when: float | None = None  # time of the eviction
        self.wanted = False  # seen more than once, or left with a priority: worth a place in a tier
        self.children: list[Node] = []  # ascending by tokens
        self.growing: dict[PagedResidency, None] = {}  # live sequences whose last full block this is, oldest first

    def branch_for(self, tokens: Tokens) -> int | None:
        """The branch of a text that goes on with these tokens: the first text after this node has the node's own, a
        text that continues a partly filled block has that block's, and any other begins one."""
        if not self.children:
            return None if self.parent is None else self.branch
        place = bisect_left(self.children, tokens, key=lambda child: child.tokens)
        before = self.children[place - 1] if place else None
        if before is not None and tokens[: len(before.tokens)] == before.tokens:
            return before.branch
        return None


class PagedResidency(Residency):
    """A live sequence and its place in the tree."""

    __slots__ = ("held", "node", "priority", "tail")

    def __init__(self, node: Node, priority: int = 0) -> None:
        super().__init__()
        self.node = node  # its last full block, or the root
        self.priority = priority
        self.tail: list[int] = []  # committed tokens after that block
        self.held: list[int] = []  # blocks that `adopt` will take: nobody may evict them until then

    @property
    def tail_block(self) -> int | None:
        """The block that holds the tail."""
        return self.blocks[self.index(self.node.depth)] if self.tail else None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class Near(NamedTuple):
    """Tokens of an earlier text after a node, and how many of them our text begins with."""

    n: int
    tokens: Sequence[int]
    block: int | None  # the block that holds them, while resident
    node: Node | None  # None: they are the tail of a live sequence


NOTHING = Near(0, (), None, None)


class PrefixTree:
    def __init__(
        self,
        block_size: int,
        max_forgotten: int,
        digest: ChainHash = chain_hash,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.block_size = block_size
        self._digest = digest
        self._clock = clock
        self._max_forgotten = max_forgotten  # most nodes without a block, which explain misses
        self._roots: dict[bytes, Node] = {}
        self._index: dict[bytes, Node] = {}
        self._forgotten: OrderedDict[Node, None] = OrderedDict()  # without a block; oldest first
        self._of_block: dict[int, Node] = {}

    # -- lookup --------------------------------------------------------------------------------------------------

    def root(self, salt: bytes) -> Node:
        digest = root_hash(salt)
        if digest not in self._roots:
            self._roots[digest] = Node(None, (), digest)
        return self._roots[digest]

    def known_root(self, salt: bytes) -> Node | None:
        return self._roots.get(root_hash(salt))

    def holds(self, block: int) -> bool:
        return block in self._of_block

    def node_of(self, block: int) -> Node | None:
        return self._of_block.get(block)

    def find(self, parent: Node, tokens: Tokens) -> Node | None:
        node = self._index.get(self._digest(parent.hash, tokens))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def walk(self, node: Node, tokens: Sequence[int]) -> Iterator[Node]:
        """The nodes of the full blocks of `tokens`, up to the first one that the tree lacks, resident or not."""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = self.find(node, tuple(tokens[start : start + self.block_size]))
            if child is None:
                return
            yield child
            node = child

    def keys(self, node: Node, tokens: Sequence[int]) -> Iterator[tuple[bytes, Tokens]]:
        """Hash and tokens of every full block of `tokens`, whether the tree has them or not."""
        key = node.hash
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            own = tuple(tokens[start : start + self.block_size])
            key = self._digest(key, own)
            yield key, own

    def nearest(self, parent: Node, tokens: Sequence[int]) -> Near:
        """The text after `parent`, resident or not, that shares the longest prefix with `tokens`.

        Children are sorted. The longest common prefix is with one of the two neighbours of the place
        where our tokens would be inserted."""
        ours = tuple(tokens[: self.block_size])
        place = self._place(parent, ours)
        return self._best(ours, parent.children[max(place - 1, 0) : place + 1], parent.growing)

    def partial(self, parent: Node, tokens: Sequence[int]) -> Near:
        """Like `nearest`, but only resident blocks, and less than a full block of tokens.

        The common prefix gets shorter with the distance from our place, so the first resident child
        on each side is enough."""
        ours = tuple(tokens[: self.block_size - 1])
        place = self._place(parent, ours)
        children, neighbours = parent.children, []
        for side in (range(place - 1, -1, -1), range(place, len(children))):
            neighbours += [next((children[i] for i in side if children[i].block is not None), parent)]
        return self._best(ours, [child for child in neighbours if child is not parent], parent.growing)

    @staticmethod
    def _best(ours: Tokens, nodes: Iterable[Node], growing: Iterable[PagedResidency]) -> Near:
        near = [Near(common(ours, node.tokens), node.tokens, node.block, node) for node in nodes]
        near += [Near(common(ours, r.tail), r.tail, r.tail_block, None) for r in growing if r.tail]
        return max(near, default=NOTHING, key=lambda candidate: candidate.n)

    # -- insertion -----------------------------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """`block` now holds these tokens. If the node already has a resident block, it keeps that one."""
        node = self.find(parent, tokens)
        if node is None:
            node = self._indexed(parent, tokens)
        else:
            node.wanted = True
        if node.block is None:
            self._forgotten.pop(node, None)
            node.block = block
            node.why = Reason.EVICTED
            node.when = None
            self._of_block[block] = node
        return node

    def chain(self, parent: Node, blocks: Iterable[Tokens], why: Reason) -> Node:
        """The last of these blocks, one after the other. Those that the tree lacks become nodes without a block."""
        for tokens in blocks:
            node = self.find(parent, tokens)
            if node is None:
                node = self._indexed(parent, tokens)
                node.why = why
                self._forget(node)
            parent = node
        return parent

    def _indexed(self, parent: Node, tokens: Tokens) -> Node:
        node = self._link(parent, tokens)
        self._index.setdefault(node.hash, node)  # after a collision no lookup finds the new node: only a miss
        return node

    def grow(self, r: PagedResidency, old: Node, new: Node) -> None:
        old.growing.pop(r, None)
        new.growing[r] = None
        if old.block is None:
            self._prune(old)

    def end(self, r: PagedResidency, node: Node, block: int | None) -> None:
        """The sequence was freed. Its tail can be reused from `block`, which no other sequence holds. Without a
        block, the tail only explains a later miss."""
        node.growing.pop(r, None)
        if r.tail:
            self._remember(node, tuple(r.tail), block)
        self._prune(node)

    def _remember(self, parent: Node, tail: Tokens, block: int | None) -> None:
        place = self._place(parent, tail)
        longer = parent.children[place] if place < len(parent.children) else None
        if longer is not None and common(longer.tokens, tail) == len(tail):
            if longer.block is not None or block is None:
                return  # the longer node already says as much
            short = longer if longer.tokens == tail else self._link(parent, tail)
        else:
            short = self._link(parent, tail)
        if block is None:
            short.why = Reason.SHORT
            self._forget(short)
        else:
            self._forgotten.pop(short, None)
            short.block, short.why, short.when = block, Reason.EVICTED, None
            self._of_block[block] = short

    # -- removal -------------------------------------------------------------------------------------------------

    def detach(self, block: int) -> None:
        """The block no longer holds its node's tokens. The node stays for a while, to explain misses."""
        node = self._of_block.pop(block)
        node.block = None
        node.when = self._clock()
        self._forget(node)

    def _forget(self, node: Node) -> None:
        self._forgotten[node] = None
        if len(self._forgotten) > self._max_forgotten:
            oldest, _ = self._forgotten.popitem(last=False)
            self._prune(oldest)

    def _link(self, parent: Node, tokens: Tokens) -> Node:
        node = Node(parent, tokens, self._digest(parent.hash, tokens))
        parent.children.insert(self._place(parent, tokens), node)
        return node

    @staticmethod
    def _place(parent: Node, tokens: Tokens) -> int:
        return bisect_left(parent.children, tokens, key=lambda child: child.tokens)

    def _prune(self, node: Node) -> None:
        """Remove this node and its ancestors while they have no block, no child, no live sequence and are not in
        `_forgotten`."""
        while node.block is None and node not in self._forgotten and not node.children and not node.growing:
            if node.parent is None:
                del self._roots[node.hash]
                return
            if self._index.get(node.hash) is node:
                del self._index[node.hash]
            siblings = node.parent.children
            place = self._place(node.parent, node.tokens)
            while siblings[place] is not node:  # after a hash collision, several siblings can have equal tokens
                place += 1
            del siblings[place]
            node = node.parent

    def check(self) -> None:
        reached: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if [child.tokens for child in node.children] != sorted(child.tokens for child in node.children):
                raise BrokenInvariant("the children of a node are out of order")
            for child in node.children:
                if child.parent is not node:
                    raise BrokenInvariant("a node does not know its parent")
            if node.block is not None:
                if self._of_block.get(node.block) is not node:
                    raise BrokenInvariant(f"block {node.block} and its node disagree")
                reached.add(node.block)
            stack += node.children
        if reached != set(self._of_block):
            raise BrokenInvariant("a block of the tree cannot be reached from a root")
        if len(self._forgotten) > self._max_forgotten:
            raise BrokenInvariant("more forgotten nodes than the bound")
