"""Rotary positions: a token is rotated by its place in the sequence, not in the chunk."""

import numpy as np
import pytest
from support.harness import Driven, bits, decoded, fill_with_nan, inputs, write_rotated

from kvarn.backends.reference import Reference, cells, dense, rope
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.graph.ops import Rope


@pytest.mark.requirement(25)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_shot_chunked_and_single_token_prefill_give_the_same_bits(strategy: str, codec: str) -> None:
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
    if CODECS[codec].tail:  # what a query reads depends on its own tile: tests/cache/test_tail.py
        return
    everywhere = np.arange(length)
    k = decoded(rope.apply(x.k, everywhere, rotary), codec)
    q = rope.apply(x.q, everywhere, rotary)
    seen = cache.plan.groups[0].config.spec
    expected = dense.attend(q, k, decoded(x.v, codec), seen, spec.k_dim**-0.5)
    assert np.abs(results[0] - expected).max() < 3e-6


@pytest.mark.requirement(25)
def test_scores_depend_on_the_distance_alone() -> None:
    """The score of a rotated pair depends on the distance alone."""
    rotary = Rope(10_000.0, 64)
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 1, 64)).astype(np.float32)
    scores = [
        (rope.apply(q, np.array([p + 9]), rotary) * rope.apply(k, np.array([p]), rotary)).sum() for p in (0, 5, 700)
    ]
    assert np.allclose(scores, scores[0], rtol=1e-4)


@pytest.mark.requirement(28)
@pytest.mark.parametrize("codec", CODECS)
def test_rotation_fused_with_the_write_equals_the_unfused_result(codec: str) -> None:
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
