"""Computes tokens of a snapshot again and compares their cells, bit by bit.

A token's cells depend on the tokens before it only through their cells. So each comparison is a step of one token, or
of one tile, over restored cells: it also shows that the cells before it are right. Non-goals: damaged files, which
digests find.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kvarn.backends.base import Memory, Program
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import Group
from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting.cells import Cells, fields_of, parts_of_block
from kvarn.lasting.snapshot import Snapshot


def recompute(
    program: Program, cache: KVCache, memory: Memory, seq: int, snapshot: Snapshot, places: Sequence[int]
) -> Iterator[int]:
    """For a sequence that has the snapshot's cells, all of them: yield each place after its cells were found equal.
    With a tail, the cells of its whole tile are made again."""
    tile = cache.plan.tile
    for place in sorted(places, reverse=True):
        begin = cache.rewind(seq, place - place % tile)
        for start in range(begin, begin + tile, cache.plan.max_chunk):
            cells = _computed(
                program, cache, memory, seq, snapshot.tokens[start : begin + tile][: cache.plan.max_chunk]
            )
        for index, last in enumerate(cells):  # the cells of a tile are in one block
            _compare_block(cache.plan.groups[index], index, memory, last - (tile - 1), snapshot, begin, tile)
        yield place


def _computed(program: Program, cache: KVCache, memory: Memory, seq: int, tokens: Sequence[int]) -> list[int]:
    """Compute the next tokens of the sequence. The cells of the last of them, by group."""
    if not cache.reserve(seq, cache.length(seq) + len(tokens)):
        raise KvarnError("no room now to compute a token: try again")
    step = cache.prepare([seq])
    try:
        program.run(memory, step, tokens, [len(tokens) - 1]).rows()
    except BaseException:
        cache.drop(step)
        raise
    cache.launched(step)
    cache.commit(seq, tokens)
    return [group.cells[-1] for group in step.groups]


def _compare_block(group: Group, index: int, memory: Memory, cell: int, snapshot: Snapshot, begin: int, n: int) -> None:
    """The n cells from this one on with those of the snapshot's tokens from `begin` on."""
    block, slot = divmod(cell, group.config.block_size)
    data = memory.read_block(index, block)
    for field, rows in parts_of_block(fields_of(group), group.config.block_size, data):
        theirs = snapshot.cells.rows[field.name][begin : begin + n]
        differ = np.flatnonzero((rows[slot : slot + n] != theirs).any(axis=1))
        if len(differ):
            raise difference(begin + int(differ[0]), field.layer)


def compare(ours: Cells, theirs: Cells) -> None:
    """All cells that both have."""
    for name, rows in ours.rows.items():
        layer = int(name.rpartition(".")[2])
        mine, other = ours.holes[layer], theirs.holes[layer]
        both = [at for at in range(ours.n) if at not in mine and at not in other]
        places = [[at - (len(hole) if at >= hole.stop else 0) for at in both] for hole in (mine, other)]
        differ = np.flatnonzero((rows[places[0]] != theirs.rows[name][places[1]]).any(axis=1))
        if len(differ):
            raise difference(both[int(differ[0])], layer)


def difference(place: int, layer: int) -> BadSnapshot:
    return BadSnapshot(f"the cells of token {place:,} in layer {layer} are not what this model computes; make it again")
