"""Blocks of the paged cache: how many a sequence takes, where they are, and what happens when none is left.

Sequences take blocks one at a time from one pool, so their blocks are scattered over the arena. Without a free block
`reserve` answers False and changes nothing.
"""

import itertools

import numpy as np
import pytest
from support.harness import Driven, backend, bits, chunks, drive, fill_with_nan, history, inputs, oracle
from support.pager import SPEC, pager, prompt

from kvarn.backends.reference import Reference
from kvarn.cache.placements.paged import Paged
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.errors import OutOfBlocks, SequenceExists

GROUP_OF_8 = LayerSpec(8, 1, 8, 8)


@pytest.mark.requirement(12)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_budget_of_8192_tokens_is_an_arena_of_blocks(block_size: int) -> None:
    tinyllama, layers = LayerSpec(32, 4, 64, 64), 2
    bytes_per_token = 2 * layers * 4 * 64 * 2
    budget = 8192 * bytes_per_token
    cache = Driven(
        CacheConfig([tinyllama] * layers, 8192, "paged", "bf16", block_size=block_size, cache_bytes=budget), Reference()
    )
    assert cache.plan.n_blocks * block_size == 8192
    assert cache.plan.nbytes == budget == cache.arena.nbytes
    if block_size == 32:
        assert cache.plan.n_blocks == 256
    for store in cache.stores:
        k, v = history(store, 3, block_size)
        assert k.shape == v.shape == (block_size, 4, 64)  # of each layer: [layers, block, kv_heads, dim] over all


@pytest.mark.requirement(13)
def test_block_arrays_are_views_of_storage() -> None:
    cache = Driven(CacheConfig([SPEC] * 2, 128, "paged", "f32"), Reference())
    drive(cache, chunks(0, 100), {(0, layer): inputs(SPEC, 100, seed=layer) for layer in (0, 1)})
    start = cache.arena.ctypes.data
    for store, at in zip(cache.stores, cache.plan.offsets, strict=True):
        for block, _ in cache.placements[0].blocks(0):
            for view, offset in zip(history(store, block, 32), (at.k, at.v), strict=True):
                assert view.ctypes.data == start + offset + block * 32 * 2 * 8 * 4
    assert cache.counters.copied == 0, "bytes bridged between the cache and the kernels"


@pytest.mark.requirement(15)
def test_blocks_are_counted_with_shared_prefixes_once() -> None:
    p = pager(64)
    prompt(p, 0, range(64))
    assert len(p.blocks(0)) == p.n_used == 2
    for seq in range(1, 6):  # five sequences that share those 64 tokens and have ten of their own
        assert prompt(p, seq, [*range(64), *range(1000 * seq, 1000 * seq + 10)]).reused == 64
    assert p.n_used == 2 + 5
    for seq in range(6, 11):  # five that share nothing
        assert prompt(p, seq, range(5000 * seq, 5000 * seq + 74)).reused == 0
    assert p.n_used == 2 + 5 + 5 * 3
    for seq in range(11):
        assert p.free(seq) > 0
        p.check()
    assert p.n_used == 0


@pytest.mark.requirement(15)
def test_opening_twice_is_refused_and_freeing_twice_is_safe() -> None:
    p = pager(8)
    prompt(p, 0, range(40))
    blocks = p.blocks(0)
    with pytest.raises(SequenceExists):
        p.open(0)
    assert p.blocks(0) == blocks
    assert p.free(0) == 2
    assert p.free(0) == 0
    p.check()
    assert p.n_used == 0


@pytest.mark.requirement(16)
@pytest.mark.usefixtures("backend")
def test_scattered_blocks_give_the_bits_of_one_slab() -> None:
    """Sequences that grow in turn, after others left holes, have scattered blocks; the bits are those of one slab."""
    lengths = {seq: 120 + 7 * seq for seq in range(4)}
    data = {(seq, 0): inputs(SPEC, n, seed=seq) for seq, n in lengths.items()}
    cache = Driven(CacheConfig([SPEC], 160, "paged", "f32", block_size=16, max_seqs=8), backend())
    fill_with_nan(cache)
    for seq in range(100, 108):  # leave a shuffled free list behind
        cache.open(seq)
        cache.reserve(seq, 70)
    for seq in np.random.default_rng(3).permutation(range(100, 108)):
        cache.free(int(seq))
    schedule = []
    for turn in range(10):  # each in turn, so that their blocks interleave
        for seq, n in lengths.items():
            if (part := min(16 + seq, n - turn * (16 + seq))) > 0:
                schedule.append({seq: part})
    output = drive(cache, schedule, data)
    scattered = [block for block, _ in cache.placements[0].blocks(1)]
    assert scattered != sorted(scattered)
    assert any(abs(a - b) != 1 for a, b in itertools.pairwise(scattered))
    for seq in lengths:
        alone = Driven(CacheConfig([SPEC], 160, "contiguous", "f32"), backend())
        expected = drive(alone, chunks(seq, lengths[seq]), {(seq, 0): data[seq, 0]})
        assert (bits(output[seq, 0]) == bits(expected[seq, 0])).all()


def leave_free_in_order(placement: Paged, wanted: list[int]) -> None:
    """Take every block, one per sequence, and free them so that `wanted` are taken next, in this order."""
    others = [block for block in range(placement.config.n_blocks) if block not in wanted]
    for block in range(placement.config.n_blocks):
        placement.open(1000 + block)
        assert placement.reserve(1000 + block, 1)
        assert placement.blocks(1000 + block) == [(block, 0)]
    for block in (*others, *reversed(wanted)):  # the block freed last is taken first
        placement.free(1000 + block)


@pytest.mark.requirement(47)
def test_block_numbers_may_come_in_any_order() -> None:
    config = CacheConfig([GROUP_OF_8], 128, "paged", "f32", block_size=16, max_seqs=4)
    cache = Driven(config, Reference())
    wanted = [5, 28, 12, 1, 30, 9, 17]
    leave_free_in_order(cache.placements[0], wanted)
    fill_with_nan(cache)
    x = inputs(GROUP_OF_8, 100, seed=2)
    cache.open(0)
    cache.reserve(0, 100)
    cache.prepare([0])
    cache.write(0, x.k, x.v)
    output = cache.attend(0, x.q)
    assert [block for block, _ in cache.placements[0].blocks(0)] == wanted
    assert np.abs(output - oracle(x, GROUP_OF_8, "f32")).max() < 2e-6


@pytest.mark.requirement(17)
def test_without_a_free_block_reserve_answers_false_and_changes_nothing() -> None:
    p = pager(6)
    prompt(p, 0, range(100))  # 4 of 6 blocks
    p.open(1)
    assert p.reserve(1, 64)
    before = p.blocks(0), p.blocks(1), p.n_used
    p.open(2)
    assert not p.reserve(2, 1)
    assert not p.reserve(1, 96), "one block more than there is"
    assert (p.blocks(0), p.blocks(1), p.n_used) == before
    assert p.blocks(2) == []
    p.check()
    p.free(0)
    assert p.reserve(2, 1)


@pytest.mark.requirement(17)
def test_a_sequence_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    p = pager(6)
    p.open(0)
    with pytest.raises(OutOfBlocks, match=r"200 tokens need 7 blocks of 32 at once and the cache has 6"):
        p.reserve(0, 200)
    assert p.blocks(0) == []


@pytest.mark.requirement(17)
def test_all_layer_groups_reserve_or_none_does() -> None:
    """The global group is full, the local one is not: neither moves."""
    local, full = LayerSpec(2, 1, 4, 4, window=16), LayerSpec(2, 1, 4, 4)
    block = 2 * 16 * 4 * 4
    windows = 2 * 4 * block  # two sequences, (16 + 32 - 2) / 16 + 1 blocks each
    config = CacheConfig(
        [local, full], 96, "paged", "f32", block_size=16, max_seqs=2, max_chunk=32, cache_bytes=windows + 5 * block
    )
    cache = Driven(config, Reference())
    assert [g.config.n_blocks for g in cache.plan.groups] == [8, 5]
    cache.open(0)
    cache.open(1)
    for start in (0, 32):
        assert cache.reserve(0, start + 32)
        cache.prepare([0])
        cache.commit(0, range(start, start + 32))
    before = [p.n_used for p in cache.placements]
    assert not cache.reserve(1, 32)
    assert [p.n_used for p in cache.placements] == before
    assert cache.placements[0].blocks(1) == []
    cache.check()
    cache.free(0)
    assert cache.reserve(1, 32)


@pytest.mark.requirement(20)
def test_less_than_a_block_per_sequence_is_unused() -> None:
    """What bench/waste.py tabulates, for one row: allocated but unused cells."""
    lengths = np.random.default_rng(0).integers(100, 2000, 50).tolist()
    for block_size in (16, 32, 64):
        p = pager(50 * 2000 // block_size, block_size)
        for seq, n in enumerate(lengths):
            prompt(p, seq, range(10_000 * seq, 10_000 * seq + n))
        allocated = p.n_used * block_size
        assert 0 <= allocated - sum(lengths) < 50 * block_size
        if block_size == 16:
            assert allocated / sum(lengths) - 1 < 0.04
