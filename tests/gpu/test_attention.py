"""The kernels `prefill`, `decode` and `reduce` through the real bookkeeping, against dense attention in float64.

The cells are NaN at the start, and blocks of several sequences lie between one another.
"""

import numpy as np
import pytest
from gpu.support.driving import Driven, Inputs, Key, Oracle, Schedule, in_cells, same_bits, workload

from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

LIMITS = {"f32": 5e-7, "f16": 5e-4, "bf16": 4e-3}  # of an error, relative to the average over absolute values
OF_CODES = 1e-2  # queries and probabilities are bf16
RAGGED: Schedule = [{0: 5, 1: 1}, {0: 1, 1: 17, 2: 1}, {0: 2, 1: 1, 2: 1}]


def spec(n_heads: int, n_kv_heads: int, dim: int, window: int | None = None, pinned: int = 0) -> LayerSpec:
    return LayerSpec(n_heads, n_kv_heads, dim, dim, window, pinned)


def settings(layer: LayerSpec, codec: str = "bf16", **more) -> CacheConfig:
    given = dict(context=64, strategy="paged", block_size=16, max_seqs=3, max_chunk=64) | more
    return CacheConfig([layer], codec=codec, window=layer.window, pinned=layer.pinned, **given)


def check(driven: Driven, found: dict[Key, np.ndarray], data: dict[Key, Inputs], first: int = 0) -> None:
    """All rows that were computed. They are the last ones of each sequence, from position `first` on."""
    codec = driven.plan.codec.name
    for key, x in data.items():
        effective = driven.plan.groups[driven.plan.group_of(key[1])].config.spec
        expected = Oracle().rows(key, x, effective, codec, range(first, len(x.q)))
        assert expected.error(found[key]) < LIMITS.get(codec, OF_CODES), key


def run(cuda, config: CacheConfig, schedule: Schedule = RAGGED) -> dict[Key, np.ndarray]:
    driven, data = Driven(cuda, config), workload(config.layers, schedule)
    found = driven.run(schedule, data)
    check(driven, found, data)
    return found


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16, 17, 20])
def test_query_heads_per_kv_head(cuda, group: int) -> None:
    """More than 16 take two programs of `decode`."""
    run(cuda, settings(spec(2 * group, 2, 16)))


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 256])
def test_sizes_of_heads(cuda, dim: int, codec: str) -> None:
    run(cuda, settings(spec(2, 1, dim), codec), [{0: 3}, {0: 1, 1: 18}, {0: 1, 1: 1}])


@pytest.mark.parametrize(
    ("codec", "dim"), [("int8", 8), ("int8", 96), ("int8", 128), ("int6", 40), ("int4", 64), ("int4", 128)]
)
def test_sizes_of_coded_heads(cuda, dim: int, codec: str) -> None:
    """A tile of positions is filled by single tokens, and another by a run."""
    driven, data = (
        Driven(cuda, settings(spec(2, 1, dim), codec, block_size=32, context=96)),
        workload([spec(2, 1, dim)], [{0: 70}]),
    )
    driven.step({0: 30}, data, attend=False)
    parts = [driven.step({0: n}, data)[0, 0] for n in (1, 1, 1, 35, 2)]
    check(driven, {(0, 0): np.concatenate(parts)}, data, first=30)


@pytest.mark.parametrize("codec", ["int8", "int6", "int4", "bf16/int8", "int8/int4"])
def test_large_coded_heads(cuda, codec: str) -> None:
    """From the first token on. It sees one value, and a number of a value in codes can be exactly zero."""
    layer, schedule = spec(4, 1, 256), [{0: 30}, {0: 1, 1: 20}, {0: 3, 1: 1}, {0: 1, 1: 3}]
    assert (in_cells(workload([layer], schedule)[1, 0].v[:1], "int8") == 0).any()
    run(cuda, settings(layer, codec, block_size=32), schedule)


@pytest.mark.parametrize("codec", ["bf16/int8", "int8/bf16", "int8/int4", "int4/int6", "bf16/int4", "int6/bf16"])
def test_pairs_of_codecs(cuda, codec: str) -> None:
    run(cuda, settings(spec(4, 2, 40), codec, block_size=32), [{0: 31, 1: 3}, {0: 1, 1: 1}, {0: 1, 1: 30}, {0: 8}])


_first: dict[str, dict[Key, np.ndarray]] = {}  # what the first test below computed


@pytest.mark.parametrize("strategy", ["contiguous", "head-major", "repeated", "ring", "sliding", "sinks", "paged"])
@pytest.mark.parametrize("block_size", [None, 16, 32, 64])
def test_strategies_and_blocks(cuda, strategy: str, block_size: int | None) -> None:
    """Windows that pass the edges of blocks, and pinned tokens."""
    config = settings(spec(4, 2, 8, window=20, pinned=3), strategy=strategy, block_size=block_size)
    schedule: Schedule = [{0: 30, 1: 1}, {0: 1, 1: 5}, {0: 14, 1: 1}, {0: 1}, {0: 9, 1: 21}]
    found = run(cuda, config, schedule)
    assert _first.setdefault("found", found).keys() == found.keys()
    assert all(same_bits(found[key], _first["found"][key]) for key in found), "a cache like the first one"


@pytest.mark.parametrize("layout", ["token-major", "head-major", "repeated"])
@pytest.mark.parametrize("codec", ["f32", "f16", "bf16", "int8", "int8/int4"])
def test_layouts(cuda, layout: str, codec: str) -> None:
    size = 16 if "int4" not in codec else 32
    run(cuda, settings(spec(6, 2, 24), codec, layout=layout, strategy="contiguous", block_size=size))


@pytest.mark.parametrize(
    ("window", "pinned"),
    [(None, 0), (1, 0), (40, 0), (300, 0), (40, 4), (300, 4), (40, 261), (10, 300), (None, 4), (256, 256)],
)
def test_splits(cuda, window: int | None, pinned: int) -> None:
    """Sequences of three splits. Some see nothing of the first or of the second one, and one is short."""
    layer = spec(2, 1, 8, window, pinned)
    driven = Driven(cuda, settings(layer, context=600, max_chunk=600, block_size=64))
    data = workload([layer], [{0: 530, 1: 9}])
    driven.step({0: 509}, data, attend=False)
    schedule: Schedule = [{0: 3, 1: 4}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 14, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    parts = [driven.step(batch, data) for batch in schedule]
    found = {key: np.concatenate([each[key] for each in parts]) for key in data}
    check(driven, {(1, 0): found[1, 0]}, {(1, 0): data[1, 0]})
    check(driven, {(0, 0): found[0, 0]}, {(0, 0): data[0, 0]}, first=509)


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "int4", "int8/int6"])
@pytest.mark.parametrize("window", [None, 50])
def test_single_tokens_have_the_bits_of_a_run(cuda, codec: str, window: int | None) -> None:
    """At the edges of tiles, splits and windows."""
    layer = spec(4, 2, 16, window)
    data = workload([layer], [{0: 260}])
    config = settings(layer, codec, context=320, max_chunk=320, block_size=32)
    whole = Driven(cuda, config).run([{0: 260}], data)[0, 0]
    for start in (31, 127, 255):
        driven = Driven(cuda, config)
        driven.step({0: start}, data, attend=False)
        for pos in range(start, start + 3):
            assert same_bits(driven.step({0: 1}, data)[0, 0], whole[pos : pos + 1]), pos


def test_hybrid_layers(cuda) -> None:
    layers = [spec(4, 2, 8, window=10), spec(4, 2, 8), spec(4, 2, 8, window=10)]
    config = CacheConfig(layers, 64, "paged", "bf16", block_size=16, max_seqs=3, max_chunk=64)
    run(cuda, config, [{0: 30, 1: 1}, {0: 1, 1: 5}, {0: 1, 1: 1}])


def test_the_scale_is_the_callers(cuda) -> None:
    layer = spec(2, 1, 8)
    driven = Driven(cuda, settings(layer))
    data = workload([layer], [{0: 20}])[0, 0]
    driven.step({0: 20}, {(0, 0): data}, attend=False)
    assert same_bits(driven.layers.attend(0, -data.q, -0.5), driven.layers.attend(0, data.q, 0.5))
    flat = driven.layers.attend(0, data.q, 0.0)
    means = np.cumsum(data.v.repeat(2, 1).astype(np.float64), 0) / np.arange(1, 21)[:, None, None]
    assert np.abs(flat - means).max() < 0.01


class TestUnseen:
    """What a row may not see has no effect on it, whatever it is."""

    @pytest.mark.parametrize("codec", ["int8", "int4", "bf16/int8"])
    @pytest.mark.parametrize("where", ["k", "v"])
    def test_of_coded_tokens(self, cuda, codec: str, where: str) -> None:
        """A row of codes that is not finite, in the tail and, when its tile is full, in the cells."""
        layer, config = spec(2, 1, 8), settings(spec(2, 1, 8), codec, block_size=32)
        data = workload([layer], [{0: 36}])
        clean = Driven(cuda, config).run([{0: 36}], data)[0, 0]
        plain = where == "k" and codec.startswith("bf16")  # an infinite number of a plain key makes scores infinite
        getattr(data[0, 0], where)[29, :, 3] = np.nan if plain else np.inf
        for schedule in ([{0: 36}], [{0: 28}, *[{0: 1}] * 5, {0: 3}]):
            found = Driven(cuda, config).run(schedule, data)[0, 0]
            assert same_bits(found[:29], clean[:29]), schedule
            assert np.isnan(found[29:]).all(), schedule

    @pytest.mark.parametrize("codec", ["f32", "bf16"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("where", ["k", "v"])
    def test_of_later_tokens(self, cuda, codec: str, value: float, where: str) -> None:
        layer = spec(4, 2, 8)
        data = workload([layer], [{0: 12}])
        clean = Driven(cuda, settings(layer, codec)).run([{0: 12}], data)[0, 0]
        getattr(data[0, 0], where)[7, :, 3] = value
        for schedule in ([{0: 12}], [{0: 6}, *[{0: 1}] * 6]):
            found = Driven(cuda, settings(layer, codec)).run(schedule, data)[0, 0]
            assert same_bits(found[:7], clean[:7]), schedule
        if where == "v" or np.isnan(value):
            assert not np.isfinite(found[7:, :, 3]).any(), "who sees it is not finite"

    @pytest.mark.parametrize("where", ["k", "v"])
    def test_of_tokens_below_the_window(self, cuda, where: str) -> None:
        layer = spec(4, 2, 8, window=4, pinned=1)
        data = workload([layer], [{0: 24}])
        clean = Driven(cuda, settings(layer)).run([{0: 24}], data)[0, 0]
        getattr(data[0, 0], where)[7] = np.nan
        for schedule in ([{0: 24}], [{0: 6}, *[{0: 1}] * 8, {0: 10}]):
            found = Driven(cuda, settings(layer)).run(schedule, data)[0, 0]
            assert same_bits(found[:7], clean[:7])
            assert same_bits(found[11:], clean[11:])
            assert np.isnan(found[7:11]).all()

    @pytest.mark.parametrize("where", ["k", "v"])
    def test_of_a_whole_tile_of_older_keys(self, cuda, where: str) -> None:
        """No row is in the tile, and only some rows still see the token."""
        layer = spec(4, 2, 8, window=20)
        data = workload([layer], [{0: 60}])
        schedule: Schedule = [{0: 40}, {0: 20}]
        clean = Driven(cuda, settings(layer, "f32")).run(schedule, data)[0, 0]
        getattr(data[0, 0], where)[25] = np.nan
        found = Driven(cuda, settings(layer, "f32")).run(schedule, data)[0, 0]
        assert np.isnan(found[25:45]).all()
        assert same_bits(found[45:], clean[45:])

    def test_of_other_sequences(self, cuda) -> None:
        layer = spec(4, 2, 8)
        data = workload([layer], RAGGED)
        clean = Driven(cuda, settings(layer)).run(RAGGED, data)
        for array in (data[1, 0].q, data[1, 0].k, data[1, 0].v):
            array[...] = np.nan
        found = Driven(cuda, settings(layer)).run(RAGGED, data)
        assert all(same_bits(found[seq, 0], clean[seq, 0]) for seq in (0, 2))
        assert np.isnan(found[1, 0]).all()


@pytest.mark.parametrize(("bad", "window", "length"), [(256, None, 257), (255, 20, 275)])
def test_a_split_in_which_every_score_is_nan(cuda, bad: int, window: int | None, length: int) -> None:
    """The last row sees one key of its split, or of the split before, and that one is NaN."""
    layer = spec(2, 1, 8, window=window)
    data = workload([layer], [{0: length}])
    data[0, 0].k[bad] = np.nan
    for schedule in ([{0: length}], [{0: length - 1}, {0: 1}]):
        found = Driven(cuda, settings(layer, context=512, max_chunk=512)).run(schedule, data)[0, 0]
        assert np.isnan(found[-1]).all()
        assert np.isfinite(found[:bad]).all()
