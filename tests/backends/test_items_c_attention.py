"""Requirements C, items 22 to 28 (and 30): attention over the cache."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support import harness
from support.harness import (
    Driven,
    assert_near,
    backend,
    bits,
    chunks,
    decoded,
    drive,
    expect,
    expect_once,
    fill_with_nan,
    inputs,
    last_rows,
    run,
    workload,
    write_rotated,
)

from kvarn.backends.base import Counters
from kvarn.backends.host import Table, over_pages
from kvarn.backends.reference import Reference, cells, dense, rope
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES, resolve
from kvarn.graph.ops import Rope

HEADS = {"TinyLlama": (32, 4), "SmolLM2": (9, 3), "Qwen2.5": (12, 2), "Gemma 3": (4, 1), "MHA": (4, 4), "MQA": (8, 1)}
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dim", [48, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_item_22_gqa_against_the_oracle(heads: tuple[int, int], dim: int) -> None:
    spec = LayerSpec(*heads, dim, dim)
    everywhere = harness.current() in harness.BACKENDS[:2]  # other instruction sets: test_kernels has the layouts
    for strategy in ("contiguous", "paged", "head-major") if everywhere else ("paged",):
        config = CacheConfig([spec], 96, strategy, "f32", max_seqs=2, max_chunk=60)
        schedule = [{0: 60, 1: 1}, {0: 1, 1: 33}, {0: 20, 1: 1}]
        output, _ = run(config, schedule)
        for key, x in workload(config, schedule).items():
            assert_near(output[key], expect_once(key, x, spec, "f32"), strategy, key)


@pytest.mark.usefixtures("backend")
def test_item_22_each_query_head_reads_its_own_kv_head() -> None:
    """Values that name their head: query head h must return KV head h // group."""
    spec = LayerSpec(6, 2, 4, 4)
    for strategy in ("contiguous", "head-major", "repeated", "paged"):
        cache = Driven(CacheConfig([spec], 32, strategy, "f32"), backend())
        x = inputs(spec, 5, seed=1)
        x.v[:] = np.arange(2)[None, :, None]
        output = drive(cache, chunks(0, 5), {(0, 0): x})[0, 0]
        assert np.allclose(output, np.repeat(np.arange(2), 3)[None, :, None])


def test_item_23_the_saving_is_real() -> None:
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("prompt", "cached"), [(5, 9), (6, 10)])
def test_item_24_prefill_and_decode_split(strategy: str, prompt: int, cached: int) -> None:
    """Five generated tokens: the last one is never written, so the cache holds prompt + generated - 1."""
    spec, layers = LayerSpec(4, 2, 8, 8), 3
    cache = Driven(CacheConfig([spec] * layers, 32, strategy, "f32"), backend())
    data = {(0, layer): inputs(spec, prompt + 4, seed=layer) for layer in range(layers)}
    drive(cache, [{0: prompt}] + [{0: 1}] * 4, data)
    assert cache.length(0) == cached == cache.usage().tokens
    assert cache.counters.calls == {"prefill": layers, "decode": 4 * layers}


@pytest.mark.usefixtures("backend")
def test_item_24_a_mixed_step_calls_both_kernels_once_per_layer() -> None:
    config = CacheConfig([LayerSpec(4, 2, 8, 8)] * 3, 64, "paged", "f32", max_seqs=3)
    _, cache = run(config, [{0: 9, 1: 1, 2: 4}])
    assert cache.counters.calls == {"prefill": 3, "decode": 3}
    _, cache = run(config, [{0: 1, 1: 1, 2: 1}])
    assert cache.counters.calls == {"decode": 3}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_item_25_rope_offset(strategy: str, codec: str) -> None:
    """One-shot, chunked and token by token: the position of a token is its place in the sequence, not in the chunk."""
    spec, length = LayerSpec(4, 2, 16, 16), 90
    x = inputs(spec, length, seed=6)
    rotary = Rope(10_000.0, spec.k_dim)
    results = []
    for size in (length, 1, 7, 32):
        config = CacheConfig([spec], 96, strategy, codec, max_chunk=length)
        cache = Driven(config, Reference())
        fill_with_nan(cache)
        cache.open(0)
        rows = []
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            cache.reserve(0, part.stop)
            cache.prepare([0])
            write_rotated(x.k[part], x.v[part], rotary, cache)
            rows.append(cache.attend(0, rope.apply(x.q[part], cache.host.positions, rotary)))
            cache.commit(0, range(part.start, part.stop))
        results.append(np.concatenate(rows))
    for other in results[1:]:
        assert (bits(results[0]) == bits(other)).all()
    everywhere = np.arange(length)
    k = decoded(rope.apply(x.k, everywhere, rotary), codec)
    q = rope.apply(x.q, everywhere, rotary)
    seen = cache.plan.groups[0].config.spec
    expected = dense.attend(q, k, decoded(x.v, codec), seen, spec.k_dim**-0.5)
    assert np.abs(results[0] - expected).max() < 3e-6


def test_item_25_rope_is_relative() -> None:
    """The score of a rotated pair depends on the distance alone."""
    rotary = Rope(10_000.0, 64)
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 1, 64)).astype(np.float32)
    scores = [
        (rope.apply(q, np.array([p + 9]), rotary) * rope.apply(k, np.array([p]), rotary)).sum() for p in (0, 5, 700)
    ]
    assert np.allclose(scores, scores[0], rtol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_item_26_lengths(length: int, backend: str) -> None:
    """Prefill and decode at every length where a tile or a block ends, in f32 and in 16 bits."""
    slow = backend == "portable" and length > 600  # test_native_attention says that all instruction sets are equal
    chunk = length if backend == "reference" and length < 600 else min(length, 40)  # test_long: all rows at once
    spec = LayerSpec(3, 1, 64, 64)
    x = inputs(spec, length, seed=length)
    exact = dense.attend(x.q[-1:], x.k, x.v, spec, 64**-0.5, first=length - 1)
    for codec, tolerance in (("f32", 5e-6), ("f16", 1e-2), ("bf16", 1e-2))[: 1 if slow else 3]:
        results = []
        for block_size in (32,) if slow else (16, 32, 64):
            config = CacheConfig([spec], 2064, "paged", codec, block_size=block_size, max_chunk=2064)
            for new in (chunk, 1):
                cache = Driven(config, harness.backend())
                fill_with_nan(cache)
                output = last_rows(cache, x, new)
                results.append(output[-1:])
                assert np.linalg.norm(output[-1:] - exact) <= tolerance * np.linalg.norm(exact)
        for other in results[1:]:
            assert (bits(results[0]) == bits(other)).all()


@pytest.mark.usefixtures("backend")
def test_item_26_an_empty_sequence_gives_zeros() -> None:
    spec = LayerSpec(2, 1, 8, 8)
    k, v = np.full((2, 4, 16, 1, 8), np.nan, np.float32)
    store = over_pages(k, v, CODECS["f32"], Counters())
    for rows, kernel in ((1, backend().kernels.decode), (3, backend().kernels.prefill)):
        table = Table(2, 2, 16)
        table.q_start[:] = [0, rows, rows]
        table.cells = np.full(rows, -1)
        out = np.full((rows, 2, 8), np.nan, np.float32)
        kernel(np.ones((rows, 2, 8), np.float32), store, table, spec, 1.0, out)
        assert (out == 0).all()


@pytest.mark.usefixtures("backend")
def test_item_26_sequences_that_sit_a_step_out() -> None:
    config = CacheConfig([LayerSpec(4, 2, 8, 8)], 64, "paged", "f32", max_seqs=4)
    schedule = [{0: 10, 1: 20, 2: 5}, {1: 1}, {0: 1, 2: 30}, {2: 1}, {0: 3, 1: 4}]
    output, _ = run(config, schedule)
    for (seq, layer), x in workload(config, schedule).items():
        assert_near(output[seq, layer], expect(x, config.layers[0], "f32"), seq)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", ["contiguous", "ring", "sliding", "paged"])
def test_item_27_gemmas_window_beside_its_global_layers(strategy: str) -> None:
    local, full = LayerSpec(4, 1, 16, 16, window=512), LayerSpec(4, 1, 16, 16)
    layers = [local] * 2 + [full]
    config = CacheConfig(layers, 1100, strategy, "bf16", max_chunk=256)
    schedule = [{0: 256}, {0: 255}, {0: 1}, {0: 1}, {0: 1}, {0: 256}, {0: 256}, {0: 1}]
    output, cache = run(config, schedule)
    for (_, layer), x in workload(config, schedule).items():
        if layer in (0, 2):
            assert_near(output[0, layer], expect_once(layer, x, layers[layer], "bf16"), layer)
    if strategy == "paged":
        window_blocks = -(-(512 + 256 - 2) // 32) + 1
        assert [g.blocks_per_sequence for g in cache.plan.groups] == [window_blocks, 35]
        assert len(cache.placements[0].blocks(0)) <= window_blocks < len(cache.placements[1].blocks(0))


def test_item_27_the_smaller_window_rules() -> None:
    config = CacheConfig([LayerSpec(2, 1, 8, 8, window=64), LayerSpec(2, 1, 8, 8)], 256, "sliding", "f32", window=100)
    cache = Driven(config, Reference())
    assert [group.config.spec.window for group in cache.plan.groups] == [64, 100]


@pytest.mark.parametrize("codec", CODECS)
def test_item_28_rotation_fused_with_the_write_equals_the_unfused_result(codec: str) -> None:
    spec = LayerSpec(4, 2, 16, 16)
    rotary = Rope(500_000.0, 16)
    caches = [Driven(CacheConfig([spec], 96, "paged", codec, max_seqs=2), Reference()) for _ in range(2)]
    x = {seq: inputs(spec, 60, seed=seq) for seq in (0, 1)}
    for cache in caches:
        for seq in (0, 1):
            cache.open(seq)
    done = {0: 0, 1: 0}
    for batch in ({0: 40}, {0: 1, 1: 25}, {0: 19, 1: 1}, {1: 34}):
        for cache, fused in zip(caches, (True, False), strict=True):
            for seq, n in batch.items():
                cache.reserve(seq, done[seq] + n)
            order = cache.prepare(list(batch)).seqs
            spans = {seq: slice(done[seq], done[seq] + batch[seq]) for seq in order}
            k, v = (np.concatenate([getattr(x[seq], name)[spans[seq]] for seq in order]) for name in "kv")
            store, table = cache.stores[0], cache.tables[0]
            if fused:
                write_rotated(k, v, rotary, cache)
            else:
                where = np.concatenate([np.arange(spans[seq].start, spans[seq].stop) for seq in order])
                cells.write(rope.apply(k, where, rotary), v, store, table)
            for seq, n in batch.items():
                cache.commit(seq, range(n))
        for seq, n in batch.items():
            done[seq] += n
    assert (caches[0].arena == caches[1].arena).all()


@pytest.mark.parametrize(
    ("context", "max_seqs", "expected"),
    [(2047, 1, "contiguous"), (2048, 1, "paged"), (2047, 2, "paged"), (16, 1, "contiguous"), (131_072, 64, "paged")],
)
def test_item_30_auto(context: int, max_seqs: int, expected: str) -> None:
    assert resolve("auto", context, max_seqs).name == expected
    assert resolve("ring", context, max_seqs).name == "ring"


# -- what must not reach a row ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_a_value_that_is_not_finite_reaches_only_the_rows_that_see_it(codec: str, poison: float) -> None:
    """Position 10 is poisoned: rows before it, and rows whose window has passed it, are as if it did not exist."""
    spec = LayerSpec(2, 1, 8, 8, window=6)
    x = inputs(spec, 40, seed=0)
    clean, _ = run(CacheConfig([spec], 64, "paged", codec), chunks(0, 40))
    for which in ("k", "v"):
        dirty = inputs(spec, 40, seed=0)
        getattr(dirty, which)[10] = poison
        for sizes in ((40,), (8, 8, 8, 16), (1,) * 40):
            cache = Driven(CacheConfig([spec], 64, "paged", codec), backend())
            output = drive(cache, chunks(0, *sizes), {(0, 0): dirty})[0, 0]
            sees = np.isin(np.arange(40), np.arange(10, 16))
            assert (bits(output[~sees]) == bits(clean[0, 0][~sees])).all()
            assert not np.isfinite(output[sees]).all(axis=(1, 2)).any()
    assert np.isfinite(x.v).all()


def test_a_missing_key_is_a_bug_and_not_a_zero() -> None:
    """Tiles are skipped by visibility, never by residency: a table that lost a visible block is an error."""
    cache = Driven(CacheConfig([LayerSpec(2, 1, 8, 8)], 128, "paged", "f32"), Reference())
    x = inputs(LayerSpec(2, 1, 8, 8), 80, seed=0)
    drive(cache, chunks(0, 79), {(0, 0): x})
    cache.reserve(0, 80)
    cache.prepare([0])
    cache.tables[0].n_blocks[0] -= 1
    with pytest.raises(AssertionError, match="a visible key is missing"):
        cache.attend(0, x.q[79:])


@pytest.mark.usefixtures("backend")
def test_padding_is_neither_written_nor_read() -> None:
    k, v = np.full((2, 4, 16, 1, 8), 7, np.float32)
    counters = Counters()
    store = over_pages(k, v, CODECS["f32"], counters)
    table = Table(1, 1, 16)
    table.cells, table.q_start[1] = np.array([-1, 20, -1]), 3
    backend().kernels.write(np.zeros((3, 1, 8), np.float32), np.zeros((3, 1, 8), np.float32), store, table)
    assert counters.written == 2 * 8 * 4
    assert (k.reshape(64, 8)[20] == 0).all()
    assert (np.delete(k.reshape(64, 8), 20, axis=0) == 7).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["token-major", "head-major", "panel", "columns", "repeated"])
def test_storage_past_two_to_the_31_elements(layout: str, codec: str, tmp_path: Path) -> None:
    """Offsets are 64 bits everywhere: a text in the highest blocks of a file of up to 17 GiB, of which few pages are
    ever touched, gives the bits that it gives in a small cache."""
    spec, x = LayerSpec(4, 2, 128, 128), inputs(LayerSpec(4, 2, 128, 128), 50, seed=0)
    heads = 4 if layout == "repeated" else 2
    far = (1 << 31) // (heads * 128) + 4096  # tokens
    outputs = []
    for context in (64, far):
        place = backend()
        config = CacheConfig([spec], context, "paged", codec, layout=layout, block_size=32, max_chunk=64)
        cache = Driven(config, place, lambda n: np.memmap(tmp_path / "arena", np.uint8, "w+", shape=n))  # sparse zeros
        cache.placements[0].pool._free.reverse()  # the highest blocks first
        outputs.append(drive(cache, chunks(0, 40, 1, 9), {(0, 0): x})[0, 0])
    assert min(block for block, _ in cache.placements[0].blocks(0)) * 32 * heads * 128 > 1 << 31
    assert (bits(outputs[0]) == bits(outputs[1])).all()
    assert_near(outputs[1], expect(x, spec, codec))
