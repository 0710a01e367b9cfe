"""Mistakes that earlier systems of this kind shipped. None may return."""

import numpy as np
import pytest
from support.harness import Driven, bits, chunks, drive, fill_with_nan, inputs, oracle, run, using

from kvarn import native
from kvarn.backends.base import Counters
from kvarn.backends.host import over_pages
from kvarn.backends.reference import Reference
from kvarn.cache.codec import CODECS
from kvarn.cache.placement import Reason
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import BadArray, PastCapacity

SPEC = LayerSpec(8, 1, 8, 8)


@pytest.mark.usefixtures("reference")
def test_repeated_heads_do_not_claim_the_saving_of_compact_ones() -> None:
    compact = plan(CacheConfig([SPEC], 128, "head-major", "bf16"))
    repeated = plan(CacheConfig([SPEC], 128, "repeated", "bf16"))
    assert repeated.nbytes == 8 * compact.nbytes  # 87.5 % would be saved by not repeating
    _, ours = run(CacheConfig([SPEC], 128, "repeated", "bf16"), chunks(0, 50))
    _, theirs = run(CacheConfig([SPEC], 128, "head-major", "bf16"), chunks(0, 50))
    assert ours.counters.written == 8 * theirs.counters.written
    assert ours.counters.read == 8 * theirs.counters.read


def test_a_store_over_pages_is_a_view_and_a_stack_is_not() -> None:
    pages = [np.zeros((16, 1, 8), np.float32) for _ in range(4)]
    stacked = np.stack(pages)
    assert not any(np.shares_memory(stacked, page) for page in pages)
    store = over_pages(stacked, stacked.copy(), CODECS["f32"], Counters())
    assert np.shares_memory(store.k, stacked)
    store.k[2, 0, 0, 3] = 5
    assert (stacked[2, 3, 0] == 5).all()


@pytest.mark.parametrize("length", [65, 66, 100, 200, 600])
def test_decode_is_right_past_64_tokens(length: int) -> None:
    config = CacheConfig([SPEC], 640, "paged", "f32", max_chunk=640)
    cache = Driven(config, Reference())
    fill_with_nan(cache)
    x = inputs(SPEC, length, seed=1)
    output = drive(cache, chunks(0, length - 1, 1), {(0, 0): x})[0, 0]
    assert np.abs(output[-1] - oracle(x, SPEC, "f32")[-1]).max() < 2e-6


def test_page_ids_need_not_be_0_to_n() -> None:
    config = CacheConfig([SPEC], 128, "paged", "f32", block_size=16, max_seqs=4)
    cache = Driven(config, Reference())
    cache.placements[0].pool._free[:] = [3, 17, 9, 30, 1, 12, 28, 5]  # taken from the end
    cache.placements[0].pool.n_blocks = cache.plan.n_blocks
    fill_with_nan(cache)
    x = inputs(SPEC, 100, seed=2)
    output = {}
    cache.open(0)
    cache.reserve(0, 100)
    cache.prepare([0])
    cache.write(0, x.k, x.v)
    output = cache.attend(0, x.q)
    assert [block for block, _ in cache.placements[0].blocks(0)] == [5, 28, 12, 1, 30, 9, 17]
    assert np.abs(output - oracle(x, SPEC, "f32")).max() < 2e-6


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


def test_a_fork_does_not_see_its_parents_later_tokens() -> None:
    for strategy in ("paged", "contiguous", "ring"):
        config = CacheConfig([SPEC], 64, strategy, "f32", max_seqs=2, max_chunk=32)
        cache = Driven(config, Reference())
        fill_with_nan(cache)
        parent, child = inputs(SPEC, 30, seed=0), inputs(SPEC, 30, seed=1)
        for name in "qkv":
            getattr(child, name)[:20] = getattr(parent, name)[:20]
        cache.open(0)
        for seq, x, span in ((0, parent, slice(0, 20)), (0, parent, slice(20, 30)), (1, child, slice(20, 30))):
            if span.start == 20 and seq == 0:
                assert cache.fork(0, 1)
            cache.reserve(seq, span.stop)
            cache.prepare([seq])
            cache.write(0, x.k[span], x.v[span])
            output = cache.attend(0, x.q[span])
            cache.commit(seq, [seq] * (span.stop - span.start))
        assert np.abs(output - oracle(child, SPEC, "f32")[20:]).max() < 2e-6, strategy


def test_the_second_chunk_does_not_start_at_position_0() -> None:
    config = CacheConfig([SPEC], 64, "paged", "f32", max_seqs=2)
    cache = Driven(config, Reference())
    cache.open(0)
    for start, stop in ((0, 20), (20, 33), (33, 34)):
        cache.reserve(0, stop)
        assert cache.prepare([0]).positions == list(range(start, stop))
        cache.commit(0, range(start, stop))


def test_every_layer_is_bound_at_its_own_offset() -> None:
    cache = Driven(CacheConfig([SPEC] * 4, 64, "paged", "int8"), Reference())
    addresses = [a.ctypes.data for s in cache.stores for a in (s.k, s.v, s.k_scale, s.v_scale)]
    offsets = [o for at in cache.plan.offsets for o in (at.k, at.v, at.k_scale, at.v_scale)]
    assert [a - cache.arena.ctypes.data for a in addresses] == offsets
    assert len(set(offsets)) == 16


def test_the_paged_cache_checks_its_bounds() -> None:
    cache = Driven(CacheConfig([SPEC], 64, "paged", "f32"), Reference())
    cache.open(0)
    with pytest.raises(PastCapacity):
        cache.reserve(0, 65)
    cache.reserve(0, 10)
    cache.prepare([0])
    with pytest.raises(BadArray):
        cache.write(0, np.zeros((11, 1, 8), np.float32), np.zeros((11, 1, 8), np.float32))


def test_the_miss_counter_moves() -> None:
    cache = Driven(CacheConfig([SPEC], 128, "paged", "f32", max_seqs=4), Reference())
    text = list(range(100))
    for seq, tokens in enumerate((text, text[:40], [*text[:40], 9, 9], [7] * 50)):
        cache.open(seq)
        reused = cache.adopt(seq, tokens).reused
        cache.reserve(seq, len(tokens))
        cache.prepare([seq])
        cache.commit(seq, tokens[reused:])
    usage = cache.usage()
    assert usage.prefix_queries == 100 + 40 + 42 + 50
    assert usage.prefix_hits == 39 + 40
    assert usage.prefix_misses == {Reason.NOTHING_SHARED: 2, Reason.DIFFERS: 1}, "one found all there was"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("codec", ["f16", "bf16", "int8"])
def test_the_native_path_is_the_one_that_runs(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the native encoder and the cache's write must break with it."""
    calls = []
    real = getattr(native, f"encode_{codec}")
    monkeypatch.setattr(native, f"encode_{codec}", lambda *args: (calls.append(codec), real(*args)))
    _, cache = run(CacheConfig([SPEC], 64, "paged", codec), chunks(0, 10, 1))
    assert len(calls) == 4, "K and V of two steps"
    assert cache.counters.calls == {"prefill": 1, "decode": 1}


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    results = []
    for name in native.isas():
        with using(name):
            output, _ = run(CacheConfig([SPEC], 64, "paged", "int8"), chunks(0, 50, 1))
        results.append(bits(output[0, 0]))
    for other in results[1:]:
        assert (results[0] == other).all()
