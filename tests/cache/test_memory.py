"""The memory that a cache holds: as large as planned, allocated once, flat over time."""

import gc
import tracemalloc

import numpy as np
import pytest
from support.caches import SPEC, cache_of, write_step
from support.harness import Driven, chunks, inputs, run, using

from kvarn.backends.reference import Reference
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

GROUP_OF_8 = LayerSpec(8, 1, 8, 8)


@pytest.mark.requirement(5)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_are_zeroed_allocated_once_and_flat_over_1000_steps(strategy: str) -> None:
    window = 64 if STRATEGIES[strategy].windowed else None
    cache = cache_of(strategy, context=1200, max_seqs=1, window=window, place=Reference())
    assert not cache.arena.any()
    address = cache.arena.ctypes.data
    assert address % 64 == 0
    x = inputs(SPEC, 1, seed=0)
    cache.open(0)
    for _ in range(50):
        write_step(cache, x.k, x.v)
    gc.collect()
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    for _ in range(1000):
        write_step(cache, x.k, x.v)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert cache.arena.ctypes.data == address
    remembered = 64 * 1000 if cache.placements[0].shares else 0  # token ids and nodes
    assert grown < 1000 * 24 + remembered, "less than the smallest object per step: nothing is kept"


@pytest.mark.requirement(19)
@pytest.mark.parametrize("strategy", ["paged", "sliding", "contiguous", "ring"])
def test_no_leak_over_1000_requests(strategy: str) -> None:
    config = CacheConfig(
        [LayerSpec(2, 1, 1, 1)], 128, strategy, "f32", max_seqs=4, block_size=16, max_chunk=64, window=40
    )
    cache = Driven(config, Reference())
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


@pytest.mark.requirement(23)
def test_storing_kv_heads_only_saves_what_the_head_counts_say() -> None:
    """TinyLlama, 2,048 tokens, 16 bits: measured from the allocation of a cache in use."""
    mib = 1 << 20
    sizes = {}
    for name, spec in {"all heads": LayerSpec(32, 32, 64, 64), "kv heads": LayerSpec(32, 4, 64, 64)}.items():
        tracemalloc.start()
        cache = Driven(CacheConfig([spec] * 22, 2048, "contiguous", "bf16", max_chunk=2048), Reference())
        x = np.ones((2048, spec.n_kv_heads, 64), np.float32)
        cache.open(0)
        cache.reserve(0, 2048)
        cache.prepare([0])
        for layer in range(22):
            cache.write(layer, x, x)
        del x
        sizes[name] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert cache.counters.written == cache.arena.nbytes == cache.plan.nbytes, "every byte of it is in use"
        assert cache.plan.offsets[1].k == cache.plan.nbytes // 22 == (16 if name == "all heads" else 2) * mib
        assert abs(sizes[name] - cache.plan.nbytes) < mib
    assert round(sizes["all heads"] / mib) == 352
    assert round(sizes["kv heads"] / mib) == 44
    assert round((sizes["all heads"] - sizes["kv heads"]) / mib) == 308


@pytest.mark.requirement(44)
def test_repeated_heads_take_the_bytes_of_all_query_heads() -> None:
    compact = plan(CacheConfig([GROUP_OF_8], 128, "head-major", "bf16"))
    repeated = plan(CacheConfig([GROUP_OF_8], 128, "repeated", "bf16"))
    assert repeated.nbytes == 8 * compact.nbytes  # 87.5 % would be saved by not repeating
    used = {}
    for strategy in ("repeated", "head-major"):
        with using("reference"):
            used[strategy] = run(CacheConfig([GROUP_OF_8], 128, strategy, "bf16"), chunks(0, 50))[1].counters
    assert used["repeated"].written == 8 * used["head-major"].written
    assert used["repeated"].read == 8 * used["head-major"].read
