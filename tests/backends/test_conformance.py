"""The book, the memory and the reference's kernels together: every strategy, layout and block size under every spec.

Against the oracle: within float32's rounding of what the cells hold. Against each other: every bit. Bookkeeping knows
neither codecs nor instruction sets. So codecs take turns here, and instruction sets do not appear. test_kernels.py
multiplies by both, over the same steps and without the book.
"""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from support.axes import BLOCKS, CHUNK, CONTEXT, PAIRS, SPECS, allowed, block_sizes, config_of
from support.harness import MIX, Expected, Schedule, assert_near, bits, expect, run, using, workload

from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

OTHERS = [name for name in MIX if name != "mixed"]


def configs(layouts: Sequence[str | None]) -> list:
    """Every combination that is not refused. Each meets every codec, under one spec or another."""
    axes = [list(enumerate(axis)) for axis in (SPECS, STRATEGIES, layouts, BLOCKS)]
    found = []
    for (i, name), (j, strategy), (k, layout), (m, block_size) in itertools.product(*axes):
        codec = list(CODECS)[(i + j + 2 * k + m) % len(CODECS)]
        config = config_of(SPECS[name], strategy, layout, block_size, codec)
        if block_size in block_sizes(strategy) and allowed(config):
            parts = (name, strategy, layout, block_size, codec)
            found.append(pytest.param(config, id="-".join(str(part) for part in parts if part)))
    return found


@cache
def expected(spec: LayerSpec, codec: str, mix: str) -> dict[int, tuple[np.ndarray, Expected]]:
    """By sequence, alone and in one piece: the bits, and what the oracle says."""
    plain = CacheConfig([spec], CONTEXT, "contiguous", codec, max_chunk=CONTEXT, max_seqs=4)
    lengths: dict[int, int] = {}
    for batch in MIX[mix]:
        for seq, n in batch.items():
            lengths[seq] = lengths.get(seq, 0) + n
    schedule: Schedule = [{seq: n} for seq, n in lengths.items()]
    with using("reference"):
        output, _ = run(plain, schedule)
        data = workload(plain, schedule)
        return {seq: (output[seq, 0], expect(data[seq, 0], spec, codec)) for seq in lengths}


def conforms(config: CacheConfig, mix: str) -> None:
    (spec,) = config.layers
    output, _ = run(config, MIX[mix])
    for seq, (alone, oracle) in expected(spec, config.codec, mix).items():
        assert_near(output[seq, 0], oracle, seq)
        assert (bits(output[seq, 0]) == bits(alone)).all(), seq


@pytest.mark.requirement(33, 34)
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("config", configs(list(LAYOUTS)))
def test_every_combination_agrees_with_the_oracle_and_gives_the_same_bits(config: CacheConfig) -> None:
    conforms(config, "mixed")


@pytest.mark.requirement(21, 33)
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("config", configs([None]))
def test_every_strategy_and_block_size_under_other_schedules(config: CacheConfig) -> None:
    """Layouts are not multiplied by schedules: a step does not know how a block is laid out."""
    conforms(config, OTHERS[len(config.strategy + config.codec + str(config.block_size)) % len(OTHERS)])


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("codec", PAIRS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_k_and_v_in_different_codecs(strategy: str, codec: str) -> None:
    conforms(config_of(SPECS["gqa"], strategy, None, None, codec), "mixed")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", ["contiguous", "paged", "ring", "sliding"])
def test_two_groups_of_layers(strategy: str) -> None:
    """Local and global layers side by side, as in Gemma 3: one cache, two tables."""
    local, full = LayerSpec(4, 1, 8, 8, window=20), LayerSpec(4, 1, 8, 8)
    layers = [local, local, full, local]
    config = CacheConfig(layers, context=CONTEXT, strategy=strategy, codec="f32", max_chunk=CHUNK, max_seqs=4)
    output, cache = run(config, MIX["mixed"])
    assert [group.layers for group in cache.plan.groups] == [(0, 1, 3), (2,)]
    for (seq, layer), x in workload(config, MIX["mixed"]).items():
        assert_near(output[seq, layer], expect(x, layers[layer], "f32"), seq, layer)


def test_every_strategy_layout_and_codec_is_in_the_suite() -> None:
    """A member added to a table is tested without touching this file."""
    seen = [config for parameter in configs(list(LAYOUTS)) for config in parameter.values]
    assert {config.layout for config in seen} == set(LAYOUTS)
    assert {(config.strategy, config.codec) for config in seen} == set(itertools.product(STRATEGIES, CODECS))
    assert {(config.layout, config.codec) for config in seen} == set(itertools.product(LAYOUTS, CODECS))
    assert {(spec, config.codec) for config in seen for spec in config.layers} == set(
        itertools.product(SPECS.values(), CODECS)
    )
    assert {config.block_size for config in seen} == set(BLOCKS)
