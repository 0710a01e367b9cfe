"""Requirements B, items 12 to 19: the paged cache. (20 is bench/waste.py, tested here; 21 is in test_conformance.)"""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest
from support.harness import (
    Driven,
    assert_near,
    backend,
    bits,
    chunks,
    drive,
    expect,
    fill_with_nan,
    history,
    inputs,
    named,
    two_backends,
)

from kvarn.backends.base import Counters
from kvarn.backends.host import Table, over_pages
from kvarn.cache.codec import CODECS
from kvarn.cache.placement import GroupConfig
from kvarn.cache.placements.paged import Paged
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import BadArray, KvarnError, OutOfBlocks, SequenceExists

SPEC = LayerSpec(4, 2, 8, 8)


def pager(n_blocks: int, block_size: int = 32, **kw) -> Paged:
    return Paged(GroupConfig(SPEC, block_size, n_blocks, context=4096, max_chunk=4096, **kw))


def grow(placement: Paged, seq: int, tokens, salt: bytes = b"") -> int:
    """Open, adopt, reserve, commit: a whole prompt. Returns the tokens reused."""
    tokens = list(tokens)
    placement.open(seq, salt)
    reused = placement.adopt(seq, tokens).reused
    assert placement.reserve(seq, len(tokens))
    named(placement, seq, tokens[reused:])
    placement.check()
    return reused


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("block_size", [16, 32])
def test_item_12_arena_of_blocks(block_size: int) -> None:
    tinyllama, layers = LayerSpec(32, 4, 64, 64), 2
    bytes_per_token = 2 * layers * 4 * 64 * 2
    budget = 8192 * bytes_per_token
    cache = Driven(
        CacheConfig([tinyllama] * layers, 8192, "paged", "bf16", block_size=block_size, cache_bytes=budget), backend()
    )
    assert cache.plan.n_blocks * block_size == 8192
    assert cache.plan.nbytes == budget == cache.arena.nbytes
    if block_size == 32:
        assert cache.plan.n_blocks == 256
    for store in cache.stores:
        k, v = history(store, 3, block_size)
        assert k.shape == v.shape == (block_size, 4, 64)  # of each layer: [layers, block, kv_heads, dim] over all


@pytest.mark.usefixtures("reference")
def test_item_13_block_arrays_alias_storage() -> None:
    cache = Driven(CacheConfig([SPEC] * 2, 128, "paged", "f32"), backend())
    drive(cache, chunks(0, 100), {(0, layer): inputs(SPEC, 100, seed=layer) for layer in (0, 1)})
    start = cache.arena.ctypes.data
    for store, at in zip(cache.stores, cache.plan.offsets, strict=True):
        for block, _ in cache.placements[0].blocks(0):
            for view, offset in zip(history(store, block, 32), (at.k, at.v), strict=True):
                assert view.ctypes.data == start + offset + block * 32 * 2 * 8 * 4
    assert cache.counters.copied == 0, "bytes bridged between the cache and the kernels"


def table_over(blocks: list[int], block_size: int, length: int, new: int) -> Table:
    table = Table(1, len(blocks), block_size)
    table.blocks[0], table.first[0] = blocks, np.arange(len(blocks)) * block_size
    table.n_blocks[0], table.kv_len[0], table.q_start[1] = len(blocks), length, new
    cell = np.arange(length - new, length)
    table.cells = np.array([blocks[p // block_size] * block_size + p % block_size for p in cell])
    return table


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", ["f32", "f16", "bf16"])
def test_item_14_block_format_and_stacked_format(codec: str) -> None:
    """[pages, layers, block, heads, dim] and [pages, block, heads, dim] hold the same cells and give the same bits."""
    pages, layers, block, layer = 7, 3, 16, 1
    dtype = np.dtype(CODECS[codec].unit)
    x = inputs(SPEC, 50, seed=4)
    k5, v5 = np.zeros((2, pages, layers, block, 2, 8), dtype)
    k4, v4 = np.zeros((2, pages, block, 2, 8), dtype)
    stores = [
        over_pages(k5, v5, CODECS[codec], Counters(), layer=layer),
        over_pages(k4, v4, CODECS[codec], Counters()),
    ]
    table = table_over([5, 2, 6, 0], block, 50, 50)
    results = []
    for store in stores:
        backend().kernels.write(x.k, x.v, store, table)
        results.append(np.zeros_like(x.q))
        backend().kernels.prefill(x.q, store, table, SPEC, 8**-0.5, results[-1])
    assert (bits(results[0]) == bits(results[1])).all()
    assert_near(results[0], expect(x, SPEC, codec))
    assert (k5[:, layer] == k4).all()
    assert not k5[:, [0, 2]].any(), "the other layers were not touched"
    for pages_of, store in zip((k5, k4), stores, strict=True):
        assert np.shares_memory(store.k, pages_of)


@pytest.mark.parametrize("rank", [1, 2, 3, 6])
def test_item_14_other_ranks_are_refused(rank: int) -> None:
    pages = np.zeros((2,) * rank, np.float32)
    with pytest.raises(BadArray, match=f"rank {rank}"):
        over_pages(pages, pages, CODECS["f32"], Counters())


def test_item_14_pages_that_disagree_are_refused() -> None:
    k, v = np.zeros((2, 16, 2, 8), np.float32), np.zeros((2, 16, 3, 8), np.float32)
    for bad in ((k, v, "f32"), (k, k, "f16"), (k.astype(np.int8), k.astype(np.int8), "int8")):
        with pytest.raises(BadArray):
            over_pages(*bad[:2], CODECS[bad[2]], Counters())
    for layer in (-1, 3):
        with pytest.raises(BadArray, match="is not in pages"):
            over_pages(
                np.zeros((2, 3, 16, 2, 8), np.float32),
                np.zeros((2, 3, 16, 2, 8), np.float32),
                CODECS["f32"],
                Counters(),
                layer=layer,
            )


def test_item_15_pager_counts() -> None:
    p = pager(64)
    grow(p, 0, range(64))
    assert len(p.blocks(0)) == p.n_used == 2
    for seq in range(1, 6):  # five sequences that share those 64 tokens and have ten of their own
        assert grow(p, seq, [*range(64), *range(1000 * seq, 1000 * seq + 10)]) == 64
    assert p.n_used == 2 + 5
    for seq in range(6, 11):  # five that share nothing
        assert grow(p, seq, range(5000 * seq, 5000 * seq + 74)) == 0
    assert p.n_used == 2 + 5 + 5 * 3
    for seq in range(11):
        assert p.free(seq) > 0
        p.check()
    assert p.n_used == 0


def test_item_15_double_create_and_double_release_are_safe() -> None:
    p = pager(8)
    grow(p, 0, range(40))
    blocks = p.blocks(0)
    with pytest.raises(SequenceExists):
        p.open(0)
    assert p.blocks(0) == blocks
    assert p.free(0) == 2
    assert p.free(0) == 0
    p.check()
    assert p.n_used == 0


@pytest.mark.usefixtures("backend")
def test_item_16_fragmented_shuffled_and_interleaved_tables() -> None:
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


@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", ["paged", "contiguous", "ring", "sinks", "sliding"])
@pytest.mark.parametrize("codec", CODECS)
def test_item_16_fork_with_copy_on_write(strategy: str, codec: str) -> None:
    """Parent and child diverge from token 45 on; each gives what it would have given alone."""
    at, end = 45, 80
    window = None if strategy in ("paged", "contiguous") else 30
    config = CacheConfig([SPEC] * 2, 96, strategy, codec, block_size=16, max_seqs=2, max_chunk=45, window=window)
    cache = Driven(config, backend())
    fill_with_nan(cache)
    spec = cache.plan.groups[0].config.spec
    parent = [inputs(SPEC, end, seed=layer) for layer in (0, 1)]
    child = [inputs(SPEC, end, seed=layer + 10) for layer in (0, 1)]
    for mine, theirs in zip(child, parent, strict=True):
        for name in "qkv":
            getattr(mine, name)[:at] = getattr(theirs, name)[:at]
    cache.open(0)
    texts, outputs = {0: parent, 1: child}, {0: [], 1: []}

    def step(lengths: dict[int, int]) -> None:
        for seq, n in lengths.items():
            assert cache.reserve(seq, cache.length(seq) + n)
        order = cache.prepare(list(lengths)).seqs
        for layer in (0, 1):
            rows = [slice(cache.length(seq), cache.length(seq) + lengths[seq]) for seq in order]
            spans = [(texts[seq][layer], r) for seq, r in zip(order, rows, strict=True)]
            k, v, q = (np.concatenate([getattr(x, name)[r] for x, r in spans]) for name in "kvq")
            cache.write(layer, k, v)
            result = cache.attend(layer, q)
            if layer == 1:
                parts = np.split(result, np.cumsum([lengths[seq] for seq in order])[:-1])
                for seq, part in zip(order, parts, strict=True):
                    outputs[seq].append(part)
        for seq, n in lengths.items():
            start = cache.length(seq)
            cache.commit(seq, [1000 * seq + p if p >= at else p for p in range(start, start + n)])

    step({0: at})
    used = cache.usage().blocks_used
    assert cache.fork(0, 1)
    if strategy == "paged":
        assert cache.usage().blocks_used == used, "shared blocks are counted once"
    for _ in range(end - at):
        step({0: 1, 1: 1})
        cache.check()
    copied_slots = {"paged": at % 16, "contiguous": at, "sliding": at % 16}.get(strategy)
    if copied_slots is not None:
        assert cache.counters.copied == copied_slots * cache.plan.bytes_per_token, "only what was written is copied"
    for seq in (0, 1):
        ours = np.concatenate(outputs[seq])[-(end - at) :]
        assert_near(ours, expect(texts[seq][1], spec, codec, first=at), seq)
    assert not np.allclose(outputs[0][-1], outputs[1][-1]), "they did diverge"


def test_item_17_out_of_blocks_waits_and_changes_nothing() -> None:
    p = pager(6)
    grow(p, 0, range(100))  # 4 of 6 blocks
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


def test_item_17_what_can_never_fit_is_refused_with_the_numbers() -> None:
    p = pager(6)
    p.open(0)
    with pytest.raises(OutOfBlocks, match=r"200 tokens need 7 blocks of 32 at once and the cache has 6"):
        p.reserve(0, 200)
    assert p.blocks(0) == []


@pytest.mark.usefixtures("reference")
def test_item_17_all_groups_or_none() -> None:
    """The global group is full, the local one is not: neither moves."""
    local, full = LayerSpec(2, 1, 4, 4, window=16), LayerSpec(2, 1, 4, 4)
    block = 2 * 16 * 4 * 4
    windows = 2 * 4 * block  # two sequences, (16 + 32 - 2) / 16 + 1 blocks each
    config = CacheConfig(
        [local, full], 96, "paged", "f32", block_size=16, max_seqs=2, max_chunk=32, cache_bytes=windows + 5 * block
    )
    cache = Driven(config, backend())
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


def test_item_18_only_unreferenced_blocks_are_evicted_least_recent_first() -> None:
    p = pager(9)
    for seq in range(3):
        grow(p, seq, range(1000 * seq, 1000 * seq + 64))  # 2 blocks each
    p.free(0)
    p.free(1)  # cached: 0's then 1's; live: 2's
    assert (p.n_used, p.n_cached, p.n_evicted) == (2, 4, 0)
    assert grow(p, 3, range(100_000, 100_000 + 4 * 32)) == 0  # needs 4: three free, one evicted
    assert p.n_evicted == 1
    assert grow(p, 4, range(32)) == 31, "the head of the oldest outlived its tail"
    assert len(p.blocks(2)) == 2
    p.free(4)
    p.open(5)
    assert p.reserve(5, 2 * 32)  # evicts the least recent: sequence 1's tail, then its head
    p.open(6)
    assert p.match(6, list(range(1000, 1065)), 64).reused == 0
    assert p.match(6, list(range(33)), 32).reused == 32, "what was used last is still there"
    assert p.match(6, list(range(2000, 2065)), 64).reused == 64, "a live sequence's blocks are never evicted"
    assert not p.reserve(6, 3 * 32), "live blocks are not taken"
    p.check()


def test_item_18_watermarks_are_off_by_default() -> None:
    for marks, cached in ((None, 20), ((0.9, 0.7), 14)):
        p = pager(20, watermarks=marks)
        for seq in range(10):  # 2 blocks each: the tenth passes 0.9 of 20, and leaves 0.7 of 20
            grow(p, seq, range(1000 * seq, 1000 * seq + 64))
            p.free(seq)
        assert p.n_cached == cached, marks
        assert p.n_evicted == 20 - cached
        p.check()


@pytest.mark.parametrize("marks", [(0.5, 0.7), (1.2, 0.5), (0.5, -0.1)])
def test_item_18_senseless_watermarks_are_refused(marks: tuple[float, float]) -> None:
    with pytest.raises(KvarnError, match="watermarks"):
        pager(20, watermarks=marks)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("strategy", ["paged", "sliding", "contiguous", "ring"])
def test_item_19_no_leak_over_a_thousand_requests(strategy: str) -> None:
    config = CacheConfig(
        [LayerSpec(2, 1, 1, 1)], 128, strategy, "f32", max_seqs=4, block_size=16, max_chunk=64, window=40
    )
    cache = Driven(config, backend())
    rng = np.random.default_rng(5)

    def request(i: int) -> None:
        tokens = [0] * 20 + rng.integers(0, 50_000, 60).tolist()
        cache.open(i)
        done = cache.adopt(i, tokens).reused
        while done < len(tokens):
            n = min(64, len(tokens) - done)
            assert cache.reserve(i, done + n)
            cache.prepare([i])
            cache.commit(i, tokens[done : done + n])
            done += n
        if i >= 3:
            cache.free(i - 3)

    tracemalloc.start()
    for i in range(300):  # until the memory of forgotten prefixes is full
        request(i)
    gc.collect()
    base = tracemalloc.get_traced_memory()[0]
    for i in range(300, 1300):
        request(i)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    for i in range(1297, 1300):
        cache.free(i)
    cache.check()
    assert cache.usage().blocks_used == cache.usage().sequences == 0
    assert grown < 1000 * 24, "less than the smallest object per request: nothing is kept"


def test_item_20_waste_is_less_than_a_block_per_sequence() -> None:
    """What bench/waste.py tabulates, for one row: allocated but unused cells."""
    lengths = np.random.default_rng(0).integers(100, 2000, 50).tolist()
    for block_size in (16, 32, 64):
        p = pager(50 * 2000 // block_size, block_size)
        for seq, n in enumerate(lengths):
            grow(p, seq, range(10_000 * seq, 10_000 * seq + n))
        allocated = p.n_used * block_size
        assert 0 <= allocated - sum(lengths) < 50 * block_size
        if block_size == 16:
            assert allocated / sum(lengths) - 1 < 0.04


def test_budget_larger_than_needed_is_kept_for_reuse() -> None:
    one = plan(CacheConfig([SPEC], 1024, "paged", "bf16"))
    big = plan(CacheConfig([SPEC], 1024, "paged", "bf16", cache_bytes=3 * one.nbytes))
    assert big.n_blocks == 3 * one.n_blocks
