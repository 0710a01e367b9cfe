"""Sliding windows: some layers see the last tokens only, others see all."""

import pytest
from support.harness import Driven, assert_near, expect, run, workload

from kvarn.backends.reference import Reference
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec


@pytest.mark.requirement(27)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", ["contiguous", "ring", "sliding", "paged"])
def test_local_layers_with_a_window_of_512_beside_global_layers(strategy: str) -> None:
    local, full = LayerSpec(4, 1, 16, 16, window=512), LayerSpec(4, 1, 16, 16)
    layers = [local] * 2 + [full]
    config = CacheConfig(layers, 1100, strategy, "bf16", max_chunk=256)
    schedule = [{0: 256}, {0: 255}, {0: 1}, {0: 1}, {0: 1}, {0: 256}, {0: 256}, {0: 1}]
    output, cache = run(config, schedule)
    for (_, layer), x in workload(config, schedule).items():
        if layer in (0, 2):
            assert_near(output[0, layer], expect(x, layers[layer], "bf16"), layer)
    if strategy == "paged":
        window_blocks = -(-(512 + 256 - 2) // 32) + 1
        assert [g.blocks_per_sequence for g in cache.plan.groups] == [window_blocks, 35]
        assert len(cache.placements[0].blocks(0)) <= window_blocks < len(cache.placements[1].blocks(0))


@pytest.mark.requirement(27)
def test_the_smaller_window_of_model_and_cache_applies() -> None:
    config = CacheConfig([LayerSpec(2, 1, 8, 8, window=64), LayerSpec(2, 1, 8, 8)], 256, "sliding", "f32", window=100)
    cache = Driven(config, Reference())
    assert [group.config.spec.window for group in cache.plan.groups] == [64, 100]
