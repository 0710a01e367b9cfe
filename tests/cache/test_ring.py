"""A ring: the window and the largest chunk share a fixed number of blocks, and positions stay absolute.

    window 20, chunks of 5, blocks of 16:  ceil((20 + 5 - 2) / 16) + 1 = 3 blocks

The first query of a chunk sees `window - 1` tokens before it, and the chunk's last token lies `chunk - 1` after it.
"""

import numpy as np
import pytest
from support.harness import Driven, assert_near, backend, chunks, expect, fill_with_nan, inputs, named, run

from kvarn.backends.reference import dense
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placements.cyclic import Cyclic
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec


@pytest.mark.requirement(10)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("strategy", "pinned"), [("ring", 0), ("sinks", 4), ("sinks", 70), ("sliding", 0)])
def test_a_wrapped_ring_equals_the_same_window_over_everything(strategy: str, pinned: int) -> None:
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


@pytest.mark.requirement(10)
@pytest.mark.usefixtures("backend")
def test_chunked_prefill_into_a_ring_of_the_planned_size() -> None:
    """Chunks smaller than a block, as long as one, and longer than the window: no visible key is overwritten."""
    spec = LayerSpec(2, 1, 4, 4, window=20)
    for chunk in (1, 5, 16, 17, 40):
        config = CacheConfig([spec], 300, "ring", "f32", block_size=16, max_chunk=chunk, window=20)
        sizes = [chunk] * (300 // chunk)
        output, _ = run(config, chunks(0, *sizes))
        x = inputs(spec, sum(sizes), seed=0)
        assert_near(output[0, 0], expect(x, spec, "f32"), chunk)


class OneBlockLess(GroupConfig):
    @property
    def window_blocks(self) -> int:
        return super().window_blocks - 1


def overwritten_keys(config: GroupConfig) -> int:
    """Keys that the first row of a chunk sees and that the chunk overwrites, over every alignment to blocks."""
    lost = 0
    for phase in range(1, config.max_chunk + 1):
        ring = Cyclic(config)
        ring.open(0)
        for n in (phase, *[config.max_chunk] * (200 // config.max_chunk)):
            start = ring.residency(0).length
            assert ring.reserve(0, start + n)
            newest = dict(ring.blocks(0))  # the position that a block holds once the chunk is written
            for block, first in ring.blocks(0):
                if newest[block] != first:
                    lost += sum(config.spec.visible(start, first + slot) for slot in range(config.block_size))
            named(ring, 0, range(n))
    return lost


@pytest.mark.requirement(10)
@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 40])
def test_one_block_less_than_planned_loses_visible_keys(chunk: int) -> None:
    settings = dict(spec=LayerSpec(2, 1, 4, 4, window=20), block_size=16, n_blocks=8, context=300, max_chunk=chunk)
    assert overwritten_keys(GroupConfig(**settings)) == 0
    assert overwritten_keys(OneBlockLess(**settings)) > 0
