"""Computes tokens of a snapshot again and compares their cells, bit by bit.

A token's cells depend on the tokens before it only through their cells. So each comparison is a step of one token over
restored cells: it also shows that the cells before it are right. Non-goals: damaged files, which digests find.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kvarn.backends.base import Memory, Program
from kvarn.cache.cache import KVCache
from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting.cells import Cells, fields_of, parts_of_block
from kvarn.lasting.snapshot import Snapshot


def recompute(
    program: Program, cache: KVCache, memory: Memory, seq: int, snapshot: Snapshot, places: Sequence[int]
) -> Iterator[int]:
    """For a sequence that has the snapshot's cells, all of them: yield each place after its cells were found equal."""
    for place in sorted(places, reverse=True):
        cache.rewind(seq, place)
        if not cache.reserve(seq, place + 1):
            raise KvarnError("no room now to compute a token: try again")
        step = cache.prepare([seq])
        try:
            program.run(memory, step, [snapshot.tokens[place]], [0]).rows()
        except BaseException:
            cache.drop(step)
            raise
        cache.launched(step)
        for index, group in enumerate(cache.plan.groups):
            (cell,) = step.groups[index].cells
            block, slot = divmod(cell, group.config.block_size)
            data = memory.read_block(index, block)
            for field, rows in parts_of_block(fields_of(group), group.config.block_size, data):
                if not np.array_equal(rows[slot], snapshot.cells.rows[field.name][place]):
                    raise difference(place, field.layer)
        cache.commit(seq, [snapshot.tokens[place]])
        yield place


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
