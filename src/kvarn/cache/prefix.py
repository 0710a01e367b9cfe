"""What was computed before: a tree of full blocks by content, one tree per salt.

A node is one block's worth of tokens after its parent's. It is found by a chained hash (parent's hash, tokens) and
believed only after its tokens and its parent compared equal, so a collision costs a miss and never a wrong answer.
What follows a node can also match in part: the first tokens of a block, filled or not, of a live sequence or a finished
one. Nodes outlive their blocks for a while: that is how a miss can say "evicted" or "differs at token i" instead of
shrugging. Non-goals: reference counts and the order of eviction (blocks.py).
"""

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import NamedTuple, Protocol

from kvarn.cache.placement import Reason
from kvarn.errors import BrokenInvariant

Tokens = tuple[int, ...]
ChainHash = Callable[[bytes, Tokens], bytes]


def chain_hash(parent: bytes, tokens: Tokens) -> bytes:
    """The same in every process, so that blocks can be named across them."""
    return blake2b(pack(f"<{len(tokens)}q", *tokens), key=parent, digest_size=16).digest()


class Growing(Protocol):
    """A live sequence, seen from the node behind which it grows."""

    tail: list[int]
    writable: int

    @property
    def tail_block(self) -> int | None:
        """The block that holds the tail."""


class Node:
    __slots__ = ("block", "children", "depth", "growing", "hash", "parent", "tokens", "when", "why")

    def __init__(self, parent: "Node | None", tokens: Tokens, digest: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = digest
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks from the root to here
        self.block: int | None = None  # the physical block, while resident
        self.why = Reason.EVICTED  # why it is not resident, or what it would mean if it were evicted now
        self.when: float | None = None  # when it ceased to be resident
        self.children: list[Node] = []  # ascending by tokens
        self.growing: dict[Growing, None] = {}  # in order of arrival, so that answers repeat


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class Near(NamedTuple):
    """Tokens that followed a node before, and how many of them ours begin with."""

    n: int
    tokens: Sequence[int]
    block: int | None  # where they are, while resident
    node: Node | None  # None: a live sequence's unfilled block


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
        self._max_forgotten = max_forgotten  # nodes kept without a block, to explain misses with
        self._roots: dict[bytes, Node] = {}
        self._index: dict[bytes, Node] = {}
        self._forgotten: OrderedDict[Node, None] = OrderedDict()  # without a block; oldest first
        self._of_block: dict[int, Node] = {}

    # -- looking -------------------------------------------------------------------------------------------------

    def root(self, salt: bytes) -> Node:
        digest = blake2b(salt, digest_size=16).digest()
        if digest not in self._roots:
            self._roots[digest] = Node(None, (), digest)
        return self._roots[digest]

    def holds(self, block: int) -> bool:
        return block in self._of_block

    def node_of(self, block: int) -> Node | None:
        return self._of_block.get(block)

    def find(self, parent: Node, tokens: Tokens) -> Node | None:
        node = self._index.get(self._digest(parent.hash, tokens))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def walk(self, node: Node, tokens: Sequence[int]) -> Iterator[Node]:
        """The nodes of tokens' full blocks, as far as they are known, resident or not."""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = self.find(node, tuple(tokens[start : start + self.block_size]))
            if child is None:
                return
            yield child
            node = child

    def nearest(self, parent: Node, tokens: Sequence[int]) -> Near:
        """Of all that ever followed `parent`, resident or not, what shares the most tokens with ours.

        Among sorted tuples the longest common prefix is with a neighbour of the place where ours would stand."""
        ours = tuple(tokens[: self.block_size])
        place = self._place(parent, ours)
        return self._best(ours, parent.children[max(place - 1, 0) : place + 1], parent.growing)

    def partial(self, parent: Node, tokens: Sequence[int]) -> Near:
        """Likewise of what is resident, less than a block of it. Away from our place children share less and less, so
        the first one on each side will do."""
        ours = tuple(tokens[: self.block_size - 1])
        place = self._place(parent, ours)
        children, found = parent.children, []
        for side in (range(place - 1, -1, -1), range(place, len(children))):
            found += [next((children[i] for i in side if children[i].block is not None), parent)]
        return self._best(ours, [child for child in found if child is not parent], parent.growing)

    @staticmethod
    def _best(ours: Tokens, nodes: Iterable[Node], growing: Iterable[Growing]) -> Near:
        near = [Near(common(ours, node.tokens), node.tokens, node.block, node) for node in nodes]
        near += [Near(common(ours, each.tail), each.tail, each.tail_block, None) for each in growing if each.tail]
        return max(near, default=NOTHING, key=lambda found: found.n)

    # -- growing -------------------------------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """`block` now holds these tokens. Where an equal block is resident already, the node keeps that one."""
        node = self.find(parent, tokens)
        if node is None:
            node = self._link(parent, tokens)
            self._index.setdefault(node.hash, node)  # a collision leaves the newcomer unknown, which is only a miss
        if node.block is None:
            self._forgotten.pop(node, None)
            node.block = block
            node.why = Reason.EVICTED
            node.when = None
            self._of_block[block] = node
        return node

    def grow(self, sequence: Growing, old: Node, new: Node) -> None:
        old.growing.pop(sequence, None)
        new.growing[sequence] = None
        if old.block is None:
            self._prune(old)

    def end(self, sequence: Growing, node: Node, block: int | None) -> None:
        """The sequence is gone. What it had of an unfilled block stays known with `block`, which nobody else holds, or
        without one is remembered, to explain a later miss."""
        node.growing.pop(sequence, None)
        if sequence.tail:
            self._remember(node, tuple(sequence.tail), block)
        self._prune(node)

    def _remember(self, parent: Node, tail: Tokens, block: int | None) -> None:
        place = self._place(parent, tail)
        longer = parent.children[place] if place < len(parent.children) else None
        if longer is not None and common(longer.tokens, tail) == len(tail):
            if longer.block is not None or block is None:
                return  # what is known already says as much
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

    # -- forgetting ----------------------------------------------------------------------------------------------

    def detach(self, block: int) -> None:
        """The block's content is given up; the node stays a while to say why."""
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
        """Remove nodes upwards from here that nothing needs: no block, no memory of one, no child, no live sequence."""
        while node.block is None and node not in self._forgotten and not node.children and not node.growing:
            if node.parent is None:
                del self._roots[node.hash]
                return
            if self._index.get(node.hash) is node:
                del self._index[node.hash]
            siblings = node.parent.children
            place = self._place(node.parent, node.tokens)
            while siblings[place] is not node:  # equal tokens stand side by side (only after a hash collision)
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
            raise BrokenInvariant("a known block cannot be reached from a root")
        if len(self._forgotten) > self._max_forgotten:
            raise BrokenInvariant("more forgotten nodes than the bound")
