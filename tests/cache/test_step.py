"""What a step is: positions, table edits, copies and cells, all integers.

`advance` says that positions are written, `commit` names their tokens. A second step may be prepared between the two.
"""

import pickle

import numpy as np
import pytest
from support.book import CONFIGS
from support.harness import Driven, fill_with_nan, inputs, named, oracle

from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy, GroupStep, RowEdit, Step
from kvarn.errors import KvarnError

SPEC = LayerSpec(4, 2, 8, 8)


def test_a_step_is_integers_that_can_be_sent_to_another_process() -> None:
    """Two sequences, the second forked off the first in mid-block: a copy, a row and a token for each."""
    cache = KVCache(plan(CacheConfig([SPEC], 64, "paged", "f32", block_size=16, max_seqs=2)))
    cache.open(0)
    cache.reserve(0, 18)
    first = cache.prepare([0])
    assert first == Step(
        seqs=(0,),
        rows=[0],
        n_new=[18],
        positions=list(range(18)),
        groups=(GroupStep([], [RowEdit(0, 0, [0, 1], [0, 16])], [2], [18], list(range(18))),),
    )
    cache.launched(first)
    cache.commit(0, range(18))
    cache.fork(0, 1)
    for seq in (0, 1):
        cache.reserve(seq, 19)
    second = cache.prepare([1, 0])
    assert second == Step(
        seqs=(0, 1),
        rows=[0, 1],
        n_new=[1, 1],
        positions=[18, 18],
        groups=(
            GroupStep(
                moves=[Copy(1, 2, 2)],
                edits=[RowEdit(0, 1, [2], [16]), RowEdit(1, 0, [0, 1], [0, 16])],
                n_blocks=[2, 2],
                kv_len=[19, 19],
                cells=[2 * 16 + 2, 1 * 16 + 2],
            ),
        ),
    )
    assert pickle.loads(pickle.dumps(second)) == second
    cache.launched(second)
    with pytest.raises(KvarnError, match="has changed since this step"):
        cache.launched(second)


@pytest.mark.requirement(50)
def test_each_chunk_starts_at_the_position_where_the_last_one_ended() -> None:
    config = CacheConfig([SPEC], 64, "paged", "f32", max_seqs=2)
    cache = Driven(config, Reference())
    cache.open(0)
    for start, stop in ((0, 20), (20, 33), (33, 34)):
        cache.reserve(0, stop)
        assert cache.prepare([0]).positions == list(range(start, stop))
        cache.commit(0, range(start, stop))


@pytest.mark.requirement(48)
def test_token_counts_follow_growth() -> None:
    config = CacheConfig([SPEC], 128, "paged", "f32", max_seqs=2)
    cache = Driven(config, Reference())
    x = inputs(SPEC, 70, seed=0)
    total = 0
    for n in (1, 31, 1, 30, 7):
        cache.open(0) if total == 0 else None
        cache.reserve(0, total + n)
        cache.prepare([0])
        cache.write(0, x.k[:n], x.v[:n])
        total += n
        assert cache.tables[0].kv_len[0] == total
        cache.commit(0, [1] * n)
        assert cache.length(0) == cache.usage().tokens == total


def test_the_next_step_is_prepared_before_the_tokens_of_the_last_are_known() -> None:
    """Two steps in flight under a window: the second is prepared, and has its block, before the first is named."""
    spec = LayerSpec(2, 1, 8, 8, window=16)
    for strategy in ("ring", "sliding"):
        config = CacheConfig([spec], 128, strategy, "f32", block_size=16, max_chunk=16, window=16, ahead=1)
        cache, x, found = Driven(config, Reference()), inputs(spec, 100, seed=4), []
        fill_with_nan(cache)
        cache.open(0)
        for position in range(100):
            assert cache.reserve(0, position + 1)
            step = cache.prepare([0])
            cache.write(0, x.k[position : position + 1], x.v[position : position + 1])
            found.append(cache.attend(0, x.q[position : position + 1]))
            cache.launched(step)
            if position:
                cache.book.commit(0, [position - 1])  # what the step before sampled is known by now
            cache.check()
        assert np.abs(np.concatenate(found) - oracle(x, spec, "f32")).max() < 2e-6, strategy


@pytest.mark.parametrize("name", ["contiguous", "ring", "sinks", "sliding", "paged", "two groups, ring"])
def test_one_token_of_each_sequence_is_reserved_and_committed_as_one_by_one(name: str) -> None:
    together, apart = (KVCache(plan(CONFIGS[name])) for _ in range(2))
    for cache in (together, apart):
        for seq in range(3):
            cache.open(seq)
            cache.reserve(seq, 2 + seq)
        cache.launched(cache.prepare([0, 1, 2]))
        for seq in range(3):
            cache.commit(seq, [7] * (2 + seq))
    for length in range(2, 60):
        assert together.reserve_next([0, 1, 2])
        assert all(apart.reserve(seq, length + seq + 1) for seq in range(3))
        step = together.prepare([2, 0, 1])
        assert step == apart.prepare([2, 0, 1])
        for cache in (together, apart):
            cache.launched(step)
        together.commit_next([0, 1, 2], [length, 0, length])
        for seq, token in enumerate([length, 0, length]):
            apart.commit(seq, [token])
        assert together.picture() == apart.picture()
        together.check()


def test_one_token_of_each_sequence_is_committed_or_none() -> None:
    cache = KVCache(plan(CacheConfig([SPEC], 64, "paged", "f32", block_size=16, max_seqs=2)))
    for seq in range(2):
        cache.open(seq)
    assert cache.reserve_next([0, 1])
    cache.launched(cache.prepare([0, 1]))
    for seqs, tokens in (([0, 0], [1, 1]), ([0, 1], [1]), ([0], [1, 2]), ([0, 2], [1, 1]), ([0, 1], [1, 2**64])):
        with pytest.raises(KvarnError):
            cache.commit_next(seqs, tokens)
        assert cache.length(0) == cache.length(1) == 0
    cache.commit_next([1], [5])
    with pytest.raises(KvarnError, match="sequence 1 has no token"):
        cache.commit_next([0, 1], [1, 1])
    assert cache.length(0) == 0
    with pytest.raises(KvarnError, match="not committed"):
        cache.reserve_next([0])


def test_a_block_is_shared_only_after_its_tokens_are_committed() -> None:
    placement = KVCache(plan(CacheConfig([SPEC], 64, "paged", "f32", block_size=16, ahead=2))).placements[0]
    placement.open(0)
    placement.reserve(0, 16)
    placement.advance(0, 16)
    placement.open(1)
    assert placement.match(1, list(range(16)), 15).reused == 0, "its tokens are not known yet"
    placement.commit(0, range(16))
    assert placement.match(1, list(range(16)), 15).reused == 15
    placement.reserve(0, 17)
    named(placement, 0, [16])
    placement.check()
