"""Attention over the cache against dense float64 attention: head counts, widths and lengths.

Lengths stand on both sides of every place where a tile or a block ends.
"""

import numpy as np
import pytest
from support import harness
from support.harness import (
    Driven,
    assert_near,
    backend,
    bits,
    chunks,
    drive,
    expect,
    fill_with_nan,
    inputs,
    last_rows,
    oracle,
    run,
    workload,
)
from support.pages import over_pages

from kvarn.backends.base import Counters
from kvarn.backends.cpu import Cpu
from kvarn.backends.host import Table
from kvarn.backends.reference import Reference, dense
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError

GROUP_OF_8 = LayerSpec(8, 1, 8, 8)
HEADS = {"TinyLlama": (32, 4), "SmolLM2": (9, 3), "Qwen2.5": (12, 2), "Gemma 3": (4, 1), "MHA": (4, 4), "MQA": (8, 1)}
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049)


@pytest.mark.requirement(22)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dim", [48, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_grouped_heads_against_the_oracle(heads: tuple[int, int], dim: int) -> None:
    spec = LayerSpec(*heads, dim, dim)
    known = None
    everywhere = harness.current() in harness.BACKENDS[:2]  # other instruction sets: test_kernels has the layouts
    for strategy in ("contiguous", "paged", "head-major") if everywhere else ("paged",):
        config = CacheConfig([spec], 96, strategy, "f32", max_seqs=2, max_chunk=60)
        schedule = [{0: 60, 1: 1}, {0: 1, 1: 33}, {0: 20, 1: 1}]
        output, _ = run(config, schedule)
        known = known or {key: expect(x, spec, "f32") for key, x in workload(config, schedule).items()}
        for key in known:
            assert_near(output[key], known[key], strategy, key)


@pytest.mark.requirement(22)
@pytest.mark.usefixtures("backend")
def test_each_query_head_reads_its_own_kv_head() -> None:
    """Values that name their head: query head h must return KV head h // group."""
    spec = LayerSpec(6, 2, 4, 4)
    for strategy in ("contiguous", "head-major", "repeated", "paged"):
        cache = Driven(CacheConfig([spec], 32, strategy, "f32"), backend())
        x = inputs(spec, 5, seed=1)
        x.v[:] = np.arange(2)[None, :, None]
        output = drive(cache, chunks(0, 5), {(0, 0): x})[0, 0]
        assert np.allclose(output, np.repeat(np.arange(2), 3)[None, :, None])


@pytest.mark.requirement(26)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_and_decode_at_every_length_where_a_tile_or_block_ends(length: int, backend: str) -> None:
    """Prefill and decode at every length where a tile or a block ends, in f32 and in 16 bits."""
    slow = backend == "portable" and length > 600  # test_native_attention says that all instruction sets are equal
    spec = LayerSpec(3, 1, 64, 64)
    x = inputs(spec, length, seed=length)
    exact = dense.attend(x.q[-1:], x.k, x.v, spec, 64**-0.5, first=length - 1)
    chunk = length if backend == "reference" and length < 600 else min(length, 40)  # other tests compute all rows
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


@pytest.mark.requirement(46)
@pytest.mark.parametrize("length", [65, 66, 100, 200, 600])
def test_decode_is_right_past_64_tokens(length: int) -> None:
    config = CacheConfig([GROUP_OF_8], 640, "paged", "f32", max_chunk=640)
    cache = Driven(config, Reference())
    fill_with_nan(cache)
    x = inputs(GROUP_OF_8, length, seed=1)
    output = drive(cache, chunks(0, length - 1, 1), {(0, 0): x})[0, 0]
    assert np.abs(output[-1] - oracle(x, GROUP_OF_8, "f32")[-1]).max() < 2e-6


@pytest.mark.requirement(26)
@pytest.mark.usefixtures("backend")
def test_an_empty_sequence_gives_zeros() -> None:
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


@pytest.mark.requirement(26)
@pytest.mark.usefixtures("backend")
def test_a_sequence_may_be_absent_from_a_step() -> None:
    config = CacheConfig([LayerSpec(4, 2, 8, 8)], 64, "paged", "f32", max_seqs=4)
    schedule = [{0: 10, 1: 20, 2: 5}, {1: 1}, {0: 1, 2: 30}, {2: 1}, {0: 3, 1: 4}]
    output, _ = run(config, schedule)
    for (seq, layer), x in workload(config, schedule).items():
        assert_near(output[seq, layer], expect(x, config.layers[0], "f32"), seq)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_may_differ_in_width(layout: str, codec: str) -> None:
    spec = LayerSpec(4, 2, 12, 6, window=20, pinned=3)
    config = CacheConfig([spec], 64, "paged", codec, layout=layout, block_size=32)
    cache = Driven(config, Reference())
    fill_with_nan(cache)
    x = inputs(spec, 50, seed=1)
    found = drive(cache, chunks(0, 33, 1, 16), {(0, 0): x})[0, 0]
    assert found.shape == (50, 4, 6)
    with harness.using("reference"):
        assert_near(found, expect(x, spec, codec))
    per_token = CODECS[codec].row(12).nbytes + CODECS[codec].row(6).nbytes
    assert cache.plan.bytes_per_token == per_token * (4 if layout == "repeated" else 2)
    with pytest.raises(KvarnError, match="the cpu backend wants them equal"):
        Cpu().memory(plan(config))


@pytest.mark.requirement(39)
def test_dense_attention_is_the_oracle_of_unequal_widths() -> None:
    spec = LayerSpec(2, 1, 12, 6)
    x = inputs(spec, 9, seed=2)
    one = dense.attend(x.q, x.k, x.v[..., :1], LayerSpec(2, 1, 12, 1), 1.0)
    assert np.allclose(dense.attend(x.q, x.k, x.v, spec, 1.0)[..., :1], one)
