"""Forks: a child shares its parent's blocks, and each gets a copy of the last one before it writes."""

import numpy as np
import pytest
from support.harness import Driven, assert_near, backend, expect, fill_with_nan, inputs, oracle, two_backends
from support.pager import SPEC

from kvarn.backends.reference import Reference
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

GROUP_OF_8 = LayerSpec(8, 1, 8, 8)


@pytest.mark.requirement(16, 49)
@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", ["paged", "contiguous", "ring", "sinks", "sliding"])
@pytest.mark.parametrize("codec", CODECS)
def test_parent_and_child_diverge_after_copy_on_write(strategy: str, codec: str) -> None:
    """Parent and child diverge from token 45 on; each gives what it would have given alone. With a tail, the child
    computes its own tile again."""
    at, end, size = 45, 80, max(CODECS[codec].tail, 16)
    window = None if strategy in ("paged", "contiguous") else 30
    config = CacheConfig([SPEC] * 2, 96, strategy, codec, block_size=size, max_seqs=2, max_chunk=45, window=window)
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
    begun = cache.length(1)
    assert begun == (at - at % CODECS[codec].tail if CODECS[codec].tail else at)
    if begun < at:
        step({1: at - begun})
    for _ in range(end - at):
        step({0: 1, 1: 1})
        cache.check()
    copied_slots = {"paged": begun % size, "contiguous": begun, "sliding": begun % size}.get(strategy)
    if copied_slots is not None:
        assert cache.counters.copied == copied_slots * cache.plan.bytes_per_token, "only what was written is copied"
    for seq in (0, 1):
        ours = np.concatenate(outputs[seq])[-(end - at) :]
        assert_near(ours, expect(texts[seq][1], spec, codec, first=at), seq)
    assert not np.allclose(outputs[0][-1], outputs[1][-1]), "they did diverge"


@pytest.mark.requirement(49)
def test_a_fork_does_not_see_its_parents_later_tokens() -> None:
    for strategy in ("paged", "contiguous", "ring"):
        config = CacheConfig([GROUP_OF_8], 64, strategy, "f32", max_seqs=2, max_chunk=32)
        cache = Driven(config, Reference())
        fill_with_nan(cache)
        parent, child = inputs(GROUP_OF_8, 30, seed=0), inputs(GROUP_OF_8, 30, seed=1)
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
        assert np.abs(output - oracle(child, GROUP_OF_8, "f32")[20:]).max() < 2e-6, strategy
