"""Blocks of one group on their way to tiers and back: each full block is named before it is evicted, and blocks
from a tier are planted into the prefix tree.

A planted block belongs to nobody's table. Its sequence holds it until `adopt`, so that nobody evicts it.
"""

from collections.abc import Callable, Iterable, Sequence

from kvarn.cache.adoption import Reason
from kvarn.cache.blocks import BlockPool
from kvarn.cache.cover import needed
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.prefix import Node, PagedResidency, PrefixTree
from kvarn.cache.tier import Place, Spill, Spilled


class Shelf:
    def __init__(self, config: GroupConfig, tree: PrefixTree, pool: BlockPool) -> None:
        self._config = config
        self._tree = tree
        self._pool = pool
        self._group = 0
        self._spill: Spill | None = None

    def spill_to(self, group: int, spill: Spill) -> None:
        """Call `spill` with every full block just before it is evicted. This is group `group` of the cache."""
        self._group, self._spill = group, spill

    def tell(self, block: int) -> None:
        """The block is about to be evicted."""
        if self._spill is not None and (found := self._named(block)) is not None:
            self._spill(found)

    def resident(self) -> list[Spilled]:
        """Every full block: first those of live sequences, then the others in the reverse order of eviction. A block
        comes before those that continue it."""
        live = sorted((b for b, n in enumerate(self._pool.references) if n), key=self._depth)
        named = (self._named(block) for block in (*live, *reversed(self._pool.cached)))
        return [each for each in named if each is not None]

    def _named(self, block: int) -> Spilled | None:
        node = self._tree.node_of(block)
        if node is None or len(node.tokens) != self._config.block_size:
            return None
        return Spilled(self._group, node.hash, node.tokens, block, node.wanted)

    def _depth(self, block: int) -> int:
        node = self._tree.node_of(block)
        return 0 if node is None else node.depth

    def want(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if node := self._tree.node_of(block):
                node.wanted = True

    # -- back into the cache -----------------------------------------------------------------------------------------

    def places(self, r: PagedResidency, tokens: Sequence[int]) -> list[Place]:
        """The full blocks of a prompt, of which r has nothing yet."""
        had = [node.block is not None for node in self._tree.walk(r.node, tokens)]
        found = self._tree.keys(r.node, tokens)
        return [Place(key, own, i < len(had) and had[i]) for i, (key, own) in enumerate(found)]

    def hold(self, r: PagedResidency, tokens: Sequence[int], length: int) -> None:
        """Hold the resident blocks that reuse of `length` tokens needs."""
        path = list(self._tree.walk(r.node, tokens[:length]))
        for logical in needed(length, self._config):
            if logical < len(path) and (block := path[logical].block) is not None:
                self._pool.share(block)
                r.held.append(block)

    def plant(self, r: PagedResidency, places: Sequence[Place], write: Callable[[int], None]) -> bool:
        """Put the last of these places into the cache, and hold it. `write(block)` stores its cells. False, with no
        change, if there is no room."""
        if not self._pool.available:
            return False
        block = self._pool.take()
        try:
            write(block)
        except BaseException:
            self._pool.release(block)
            raise
        node = self._tree.insert(self._parent(r, places), places[-1].tokens, block)
        assert node.block is not None
        if node.block != block:  # somebody computed it meanwhile
            self._pool.share(node.block)
            self._pool.release(block)
        r.held.append(node.block)
        return True

    def _parent(self, r: PagedResidency, places: Sequence[Place]) -> Node:
        """The node before the last place. Mostly it is the block that was planted before."""
        last = self._tree.node_of(r.held[-1]) if r.held else None
        if last is not None and last.depth == len(places) - 1:
            return last
        why = Reason.EVICTED if self._config.spec.window is None else Reason.OUT_OF_WINDOW
        return self._tree.chain(r.node, (place.tokens for place in places[:-1]), why)

    def let_go(self, r: PagedResidency) -> None:
        held, r.held = r.held, []
        for block in reversed(held):
            self._pool.release(block)
