"""One suite that every strategy, layout, codec, spec, block size and batch mix passes.

Against the oracle: within float32's rounding of what the cells hold. Against each other: every bit.
"""

import itertools

import pytest
from support.harness import MIX, Expected, assert_near, bits, expect, run, strategies, thorough, workload

from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import KvarnError

CONTEXT, CHUNK = 160, 48
SPECS = {
    "gqa": LayerSpec(6, 2, 8, 8),
    "mha": LayerSpec(2, 2, 16, 16),
    "mqa": LayerSpec(4, 1, 8, 8),
    "window": LayerSpec(6, 2, 8, 8, window=40),
    "window of 1": LayerSpec(6, 2, 8, 8, window=1),
    "pinned": LayerSpec(6, 2, 8, 8, window=24, pinned=5),
    "pinned past a block": LayerSpec(6, 2, 8, 8, window=24, pinned=37),
}
BLOCKS = (None, 16, 32, 64)  # None: the strategy's own


def configs(spec: LayerSpec, codec: str):
    """Every combination that is not refused; what must be refused is listed in test_layouts."""
    for strategy, layout, block_size in itertools.product(strategies(), LAYOUTS, BLOCKS if thorough() else (32,)):
        config = CacheConfig(
            [spec],
            context=CONTEXT,
            strategy=strategy,
            layout=layout,
            codec=codec,
            block_size=block_size,
            max_chunk=CHUNK,
            max_seqs=4,
            window=spec.window,
            pinned=spec.pinned,
        )
        try:
            plan(config)
        except KvarnError:
            continue
        yield pytest.param(config, id=f"{strategy}-{layout}-{block_size}")


def schedule_for(config: CacheConfig) -> str:
    """Spread the batch mixes over the combinations instead of multiplying by them."""
    names = list(MIX)
    return names[hash_of(config) % len(names)]


def hash_of(config: CacheConfig) -> int:
    text = f"{config.strategy} {config.layout} {config.block_size} {config.codec} {config.layers}"
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_item_33_every_combination_agrees_with_the_oracle(spec: LayerSpec, codec: str) -> None:
    tested = 0
    known: dict[tuple[str, int], Expected] = {}
    for parameter in configs(spec, codec):
        (config,) = parameter.values
        mix = schedule_for(config)
        output, _ = run(config, MIX[mix])
        for (seq, layer), x in workload(config, MIX[mix]).items():
            if (mix, seq) not in known:
                known[mix, seq] = expect(x, spec, codec)
            assert_near(output[seq, layer], known[mix, seq], parameter.id, seq)
        tested += 1
    assert tested >= (10 if thorough() else 4) * len(strategies())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_item_34_every_combination_gives_the_same_bits(spec: LayerSpec, codec: str) -> None:
    plain = CacheConfig([spec], context=CONTEXT, strategy="contiguous", codec=codec, max_chunk=CONTEXT, max_seqs=4)
    lengths = {seq: sum(batch.get(seq, 0) for batch in MIX["mixed"]) for seq in range(3)}
    expected, _ = run(plain, [{seq: n} for seq, n in lengths.items()])  # one at a time, each in one piece
    for parameter in configs(spec, codec):
        (config,) = parameter.values
        output, _ = run(config, MIX["mixed"])
        for key in expected:
            assert (bits(output[key]) == bits(expected[key])).all(), (parameter.id, key)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mix", MIX)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_item_21_batch_and_chunks_do_not_change_a_bit(spec: LayerSpec, mix: str) -> None:
    config = CacheConfig(
        [spec], context=CONTEXT, strategy="paged", codec="f32", max_chunk=CHUNK, max_seqs=4, window=spec.window
    )
    lengths: dict[int, int] = {}
    for batch in MIX[mix]:
        for seq, n in batch.items():
            lengths[seq] = lengths.get(seq, 0) + n
    batched, _ = run(config, MIX[mix])
    for seq, length in lengths.items():
        for size in (1, 5, 16, 48):
            steps = [{seq: min(size, length - start)} for start in range(0, length, size)]
            alone, _ = run(config, steps)
            assert (bits(alone[seq, 0]) == bits(batched[seq, 0])).all(), (seq, size)


@pytest.mark.usefixtures("backend")
def test_two_groups_of_layers() -> None:
    """Local and global layers side by side, as in Gemma 3: one cache, two tables."""
    local, full = LayerSpec(4, 1, 8, 8, window=20), LayerSpec(4, 1, 8, 8)
    for strategy in ("contiguous", "paged", "ring", "sliding"):
        layers = [local, local, full, local]
        config = CacheConfig(layers, context=CONTEXT, strategy=strategy, codec="f32", max_chunk=CHUNK, max_seqs=4)
        output, cache = run(config, MIX["mixed"])
        assert [group.layers for group in cache.plan.groups] == [(0, 1, 3), (2,)]
        for (seq, layer), x in workload(config, MIX["mixed"]).items():
            assert_near(output[seq, layer], expect(x, layers[layer], "f32"), strategy, seq, layer)


def test_every_layout_and_codec_is_in_the_suite() -> None:
    """A member added to a table is tested without touching this file."""
    seen = {(config.layout, config.strategy) for p in configs(SPECS["gqa"], "f32") for config in p.values}
    assert {layout for layout, _ in seen} == set(LAYOUTS)
    assert {strategy for _, strategy in seen} == set(STRATEGIES)
