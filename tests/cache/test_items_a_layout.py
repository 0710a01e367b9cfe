"""Requirements A, items 1 to 11: layout and writing."""

import gc
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
    run,
    two_backends,
)

from kvarn.backends.reference import dense
from kvarn.backends.reference.cells import repeat_heads
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import BadArray, BadStep, KvarnError, PastCapacity, UnknownLayer, UnknownSequence

SPEC = LayerSpec(6, 2, 5, 5)


def cache_of(strategy: str = "contiguous", context: int = 64, codec: str = "f32", spec=SPEC, **kw) -> Driven:
    return Driven(CacheConfig([spec] * kw.pop("layers", 1), context, strategy, codec, **kw), backend())


def write_step(cache: Driven, k: np.ndarray, v: np.ndarray, seq: int = 0) -> None:
    start = cache.length(seq)
    assert cache.reserve(seq, start + len(k))
    cache.prepare([seq])
    for layer in range(len(cache.stores)):
        cache.write(layer, k, v)
    cache.commit(seq, range(start, start + len(k)))


@pytest.mark.usefixtures("backend")
def test_item_01_canonical_shape_and_strides() -> None:
    cache = cache_of(layout="token-major", max_seqs=2)
    x = {seq: inputs(SPEC, 9, seed=seq) for seq in (0, 1)}
    for seq in x:
        cache.open(seq)
        write_step(cache, x[seq].k, x[seq].v, seq)
    views = []
    for seq in x:
        ((block, _),) = cache.placements[0].blocks(seq)
        k, v = history(cache.stores[0], block, 9)
        assert k.shape == v.shape == (9, SPEC.n_kv_heads, SPEC.k_dim)
        assert k.strides == v.strides == (SPEC.n_kv_heads * SPEC.k_dim * 4, SPEC.k_dim * 4, 4)
        assert (k == x[seq].k).all()
        assert (v == x[seq].v).all()
        views.append(k)
    batched = np.concatenate(views, axis=1)  # [seq, batch * n_kv_heads, head_dim]
    assert batched.shape == (9, 2 * SPEC.n_kv_heads, SPEC.k_dim)
    assert (batched[:, SPEC.n_kv_heads :] == x[1].k).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_01_and_03_a_write_touches_one_timestep(strategy: str) -> None:
    """The whole arena before and after: only the fresh timestep's bytes differ, repeated or not."""
    cache = cache_of(strategy, max_seqs=2, layers=2)
    x = inputs(SPEC, 8, seed=3)
    cache.open(0)
    write_step(cache, x.k[:7], x.v[:7])
    before = cache.arena.copy()
    write_step(cache, x.k[7:], x.v[7:])
    changed = np.flatnonzero(before.view(np.uint32) != cache.arena.view(np.uint32))
    heads = cache.stores[0].n_heads
    assert len(changed) == 2 * 2 * heads * SPEC.k_dim  # layers, K and V
    for store in cache.stores:
        block, first = cache.placements[0].blocks(0)[0]
        assert (store.k[block, 0, :, 7 - first] == repeat_heads(x.k[7:], heads // 2)[0]).all()


@pytest.mark.usefixtures("backend")
def test_item_02_repeated_equals_repeat_and_transpose_at_every_step() -> None:
    """Batch 2, 2 KV heads, group 3, 4 tokens, dim 5: [batch * n_heads, seq, dim] against a canonical cache."""
    canonical = cache_of("contiguous", layout="token-major", max_seqs=2)
    repeated = cache_of("repeated", max_seqs=2)
    x = {seq: inputs(SPEC, 4, seed=seq) for seq in (0, 1)}
    for cache in (canonical, repeated):
        cache.open(0)
        cache.open(1)
    for t in range(4):
        sides = []
        for cache in (canonical, repeated):
            for seq in (0, 1):
                write_step(cache, x[seq].k[t : t + 1], x[seq].v[t : t + 1], seq)
            views = [history(cache.stores[0], cache.placements[0].blocks(seq)[0][0], t + 1) for seq in (0, 1)]
            sides.append([np.stack([view[i] for view in views]) for i in (0, 1)])  # [batch, seq, heads, dim]
        for plain, wide in zip(*sides, strict=True):
            expected = np.repeat(plain, 3, axis=2).transpose(0, 2, 1, 3).reshape(2 * 6, t + 1, 5)
            assert (wide.transpose(0, 2, 1, 3).reshape(2 * 6, t + 1, 5) == expected).all()


@pytest.mark.usefixtures("reference")
def test_item_02_repeated_exists_only_under_gqa_and_the_plain_repeat_stays() -> None:
    with pytest.raises(KvarnError, match="nothing to repeat"):
        cache_of("repeated", spec=LayerSpec(4, 4, 8, 8))
    x = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    assert repeat_heads(x, 1) is x
    assert (repeat_heads(x, 2)[:, [0, 2, 4, 6]] == x).all()
    assert (repeat_heads(x, 2)[:, [1, 3, 5, 7]] == x).all()


@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_04_bytes_written_and_read(strategy: str, codec: str) -> None:
    spec, layers = LayerSpec(6, 2, 8, 8), 3
    cache = cache_of(strategy, 200, codec, spec, layers=layers, max_chunk=64)
    copies = spec.group if strategy == "repeated" else 1
    per_token = 2 * layers * spec.n_kv_heads * copies * CODECS[codec].k_row(spec.k_dim).nbytes
    x = inputs(spec, 100, seed=1)
    cache.open(0)
    for length in range(1, 101):
        step = slice(length - 1, length)
        written, read = cache.counters.written, cache.counters.read
        cache.reserve(0, length)
        cache.prepare([0])
        for layer in range(layers):
            cache.write(layer, x.k[step], x.v[step])
            cache.attend(layer, x.q[step])
        cache.commit(0, [length])
        assert cache.counters.written - written == per_token, "the write is constant"
        assert cache.counters.read - read == per_token * length, "the read is linear"
    assert cache.counters.copied == 0
    if codec == "f32":  # the formula of the requirement, spelled out
        assert cache.counters.read - read == 2 * layers * spec.n_kv_heads * spec.k_dim * 100 * 4 * copies


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_05_buffers_are_zeroed_persistent_and_flat(strategy: str) -> None:
    cache = cache_of(strategy, context=1200, max_seqs=1, window=64 if STRATEGIES[strategy].windowed else None)
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


def misuses(cache: Driven):
    k = np.zeros((1, 2, 5), np.float32)
    wide = np.zeros((1, 2, 10), np.float32)

    def write(k=k, v=k, layer=0):
        return lambda: cache.write(layer, k, v)

    return {
        "wrong rank": (write(k[0]), BadArray),
        "wrong heads": (write(np.zeros((1, 6, 5), np.float32)), BadArray),
        "wrong dim": (write(v=np.zeros((1, 2, 4), np.float32)), BadArray),
        "wrong dtype": (write(k.astype(np.float64)), BadArray),
        "not contiguous": (write(wide[:, :, ::2]), BadArray),
        "not an array": (write([[0.0]]), BadArray),
        "wrong number of tokens": (write(np.zeros((2, 2, 5), np.float32)), BadArray),
        "zero tokens": (write(np.zeros((0, 2, 5), np.float32)), BadArray),
        "unknown layer": (write(layer=1), UnknownLayer),
        "negative layer": (write(layer=-1), UnknownLayer),
        "queries of the wrong shape": (lambda: cache.attend(0, k), BadArray),
        "past capacity": (lambda: cache.reserve(0, 65), PastCapacity),
        "past the largest chunk": (lambda: cache.reserve(1, 33), PastCapacity),
        "zero steps": (lambda: cache.reserve(0, cache.length(0)), BadStep),
        "commit of nothing": (lambda: cache.commit(0, []), BadStep),
        "commit of more than was prepared": (lambda: cache.commit(0, [1, 2, 3]), BadStep),
        "commit of what was reserved but not written": (lambda: cache.commit(1, [1]), BadStep),
        "a step of no sequence": (lambda: cache.prepare([]), BadStep),
        "a step with nothing reserved": (lambda: cache.prepare([2]), BadStep),
        "adopt in mid-sequence": (lambda: cache.adopt(0, [1, 2, 3]), BadStep),
        "unknown sequence": (lambda: cache.reserve(9, 1), UnknownSequence),
        "rewind forward": (lambda: cache.rewind(0, 60), BadStep),
    }


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_06_misuse_raises_a_named_error_and_changes_nothing(strategy: str) -> None:
    cache = cache_of(strategy, max_seqs=3, max_chunk=32)
    for seq in range(3):
        cache.open(seq)
    x = inputs(SPEC, 10, seed=0)
    write_step(cache, x.k, x.v)
    assert cache.reserve(0, 11)
    assert cache.reserve(1, 5)
    cache.prepare([0])
    before = cache.arena.copy(), cache.usage(), [cache.placements[0].blocks(seq) for seq in range(3)]
    for name, (attempt, error) in misuses(cache).items():
        with pytest.raises(error) as raised:
            attempt()
        assert "\n" not in str(raised.value), name
        assert (cache.arena == before[0]).all(), name
        after = cache.usage(), [cache.placements[0].blocks(seq) for seq in range(3)]
        assert after == before[1:], name
        cache.check()
    cache.write(0, x.k[:1], x.v[:1])  # and the step that was under way goes on
    cache.commit(0, [10])
    with pytest.raises(BadStep, match="prepare one and apply it first"):
        cache_of(strategy).write(0, x.k[:1], x.v[:1])


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("layout", ["token-major", "head-major", "repeated"])
def test_item_07_history_aliases_storage_for_every_length(layout: str) -> None:
    cache = cache_of("contiguous", 64, layout=layout)
    x = inputs(SPEC, 64, seed=2)
    cache.open(0)
    write_step(cache, x.k, x.v)
    (block, _), at = cache.placements[0].blocks(0)[0], cache.plan.offsets[0]
    for length in range(1, 65):
        for view, offset in zip(history(cache.stores[0], block, length), (at.k, at.v), strict=True):
            assert view.ctypes.data == cache.arena.ctypes.data + offset
            assert view.shape[0] == length
            assert np.shares_memory(view, cache.arena)
    assert cache.counters.copied == 0


def test_item_08_byte_offsets_of_every_layer() -> None:
    wide = plan(CacheConfig([LayerSpec(40, 40, 128, 128)] * 40, context=4096, strategy="head-major", codec="f32"))
    for layer, at in enumerate(wide.offsets):
        assert at.k == layer * 167_772_160
        assert at.v == at.k + 83_886_080
    assert wide.nbytes == 6_710_886_400
    half = plan(CacheConfig([LayerSpec(32, 32, 128, 128)] * 40, context=4096, strategy="head-major", codec="bf16"))
    assert half.nbytes == 2_684_354_560
    phi4 = plan(CacheConfig([LayerSpec(40, 10, 128, 128)] * 40, context=4096, strategy="head-major", codec="f32"))
    assert phi4.nbytes * 4 == wide.nbytes


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_09_layers_never_overwrite_each_other(strategy: str, codec: str) -> None:
    cache = cache_of(strategy, 40, codec, layers=3)
    x = [inputs(SPEC, 40, seed=layer) for layer in range(3)]
    output = drive(cache, chunks(0, 30, 10), {(0, layer): x[layer] for layer in range(3)})
    for layer in range(3):
        alone = cache_of(strategy, 40, codec)
        expected = drive(alone, chunks(0, 40), {(0, 0): x[layer]})
        assert (bits(output[0, layer]) == bits(expected[0, 0])).all()
    ends = [at.end for at in cache.plan.offsets]
    assert [at.k for at in cache.plan.offsets] == [0, *ends[:-1]]


@pytest.mark.usefixtures("backend")
def test_item_09_index_inside_a_head_major_slab() -> None:
    cache = cache_of("head-major", context=64, layers=2)
    x = inputs(SPEC, 20, seed=5)
    cache.open(0)
    write_step(cache, x.k, x.v)
    for layer in range(2):
        at = cache.plan.offsets[layer]
        k, v = (cache.arena[offset:].view(np.float32) for offset in (at.k, at.v))
        for head in range(2):
            for pos in range(20):
                index = head * 64 * 5 + pos * 5
                assert (k[index : index + 5] == x.k[pos, head]).all()
                assert (v[index : index + 5] == x.v[pos, head]).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("strategy", "pinned"), [("ring", 0), ("sinks", 4), ("sinks", 70), ("sliding", 0)])
def test_item_10_ring_wraps(strategy: str, pinned: int) -> None:
    """At W-1, W, W+1, at R*B-1, R*B, R*B+1 and after 2.5 laps: the same window over everything gives the same."""
    window, block, chunk = 4096, 32, 256
    spec = LayerSpec(2, 1, 4, 4)
    context = 12_000
    config = CacheConfig(
        [spec], context, strategy, "f32", block_size=block, max_chunk=chunk, window=window, pinned=pinned
    )
    cache = Driven(config, backend())
    fill_with_nan(cache)
    config = cache.plan.groups[0].config
    lap = config.window_blocks * block
    assert config.window_blocks == -(-(window + chunk - 2) // block) + 1
    assert cache.plan.groups[0].blocks_per_sequence == config.window_blocks + -(-pinned // block)
    stops = sorted({window - 1, window, window + 1, lap - 1, lap, lap + 1, 5 * lap // 2})
    x = inputs(spec, stops[-1], seed=8)
    cache.open(0)
    for stop in stops:
        while (start := cache.length(0)) < stop:
            n = 1 if start == stop - 1 else min(chunk, stop - 1 - start)
            cache.reserve(0, start + n)
            cache.prepare([0])
            cache.write(0, x.k[start : start + n], x.v[start : start + n])
            row = cache.attend(0, x.q[start : start + n]) if n == 1 else None
            cache.commit(0, range(start, start + n))
        seen = dense.attend(x.q[stop - 1 : stop], x.k[:stop], x.v[:stop], config.spec, spec.k_dim**-0.5, stop - 1)
        assert row is not None
        assert np.abs(row - seen).max() < 2e-6, stop
    cache.check()


@pytest.mark.usefixtures("backend")
def test_item_10_chunked_prefill_into_a_ring_sized_by_the_formula() -> None:
    """Every chunk size up to the largest, at every phase; one block less and the first rows of a chunk lose keys."""
    spec = LayerSpec(2, 1, 4, 4, window=20)
    for chunk in (1, 5, 16, 17, 40):
        config = CacheConfig([spec], 300, "ring", "f32", block_size=16, max_chunk=chunk, window=20)
        sizes = [chunk] * (300 // chunk)
        output, _ = run(config, chunks(0, *sizes))
        x = inputs(spec, sum(sizes), seed=0)
        assert_near(output[0, 0], expect(x, spec, "f32"), chunk)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_11_the_write_costs_the_same_at_any_length(strategy: str) -> None:
    cache = cache_of(strategy, 4100, max_chunk=512)
    x = inputs(SPEC, 512, seed=0)
    cache.open(0)
    costs = []
    for target in (0, 999, 3999):
        while (missing := target - cache.length(0)) > 0:
            n = min(512, missing)
            write_step(cache, x.k[:n], x.v[:n])
        before = cache.counters.written
        write_step(cache, x.k[:1], x.v[:1])
        costs.append(cache.counters.written - before)
    assert len(set(costs)) == 1
