"""The speed of a whole model from some of its layers: which layers, what they are called, and what is added up."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_gguf import write

from kvarn.cache.plan import CacheConfig
from kvarn.forecast import miniature
from kvarn.forecast.miniature import Seconds
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models.families import graph_of


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write(tmp_path / "tiny.gguf", "gemma3"))


def mixed(model: Checkpoint, n_layers: int) -> tuple[object, list]:
    """As many layers: every third one sees everything, and the first two have other types."""
    small = miniature.miniature(model.config, model.infos, [0] * n_layers)
    infos = [
        replace(info, type="Q6_K") if info.name in ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight") else info
        for info in small.infos
    ]
    return replace(small.config, windows=tuple(None if i % 3 == 2 else 8 for i in range(n_layers))), infos


def test_kinds_of_layers(model: Checkpoint) -> None:
    config, infos = mixed(model, 12)
    found = miniature.kinds_of(config, infos)
    assert sorted(found.values()) == [[0, 1], [2, 5, 8, 11], [3, 4, 6, 7, 9, 10]]


def test_a_miniature_is_a_model(model: Checkpoint) -> None:
    config, infos = mixed(model, 12)
    small = miniature.miniature(config, infos, [2, 0, 0])
    assert (small.config.n_layers, small.config.windows) == (3, (None, 8, 8))
    types = {info.name: info.type for info in small.infos}
    assert [types[f"blk.{i}.ffn_down.weight"] == "Q6_K" for i in range(3)] == [False, True, True]
    graph = graph_of(small.config, small.shapes)
    assert {name for name in graph.weights if name.startswith("blk.")} == {n for n in small.shapes if n[:4] == "blk."}


def test_layers_add_up(model: Checkpoint) -> None:
    """If layers of a kind take equally long, the forecast is exact."""
    config, infos = mixed(model, 40)
    kinds = miniature.kinds_of(config, infos)
    of_kind = dict(zip(kinds, (2.0, 3.0, 4.0), strict=True))
    takes = {layer: of_kind[kind] for kind, layers in kinds.items() for layer in layers}
    asked = []

    def measure(layers: Sequence[int]) -> list[Seconds]:
        asked.append(len(layers))
        total = sum(takes[layer] for layer in layers)
        return [Seconds(3 + depth + total * depth, 5 + 2 * total) for depth in (1, 4)]

    found = miniature.extrapolated(kinds, 2, measure)
    assert found == measure(range(40))
    assert asked == [6, 8, 8, 8, 40]
    assert miniature.extrapolated(kinds, 10, measure) == measure(range(40)), "a small model is built whole"
    assert asked[-2:] == [40, 40]


def test_a_host_that_takes_longer_than_a_few_layers(model: Checkpoint) -> None:
    """The device works while the host prepares the next step: more layers must show in the time of a step."""
    config, infos = mixed(model, 80)
    kinds, asked = miniature.kinds_of(config, infos), []

    def measure(layers: Sequence[int]) -> list[Seconds]:
        asked.append(len(layers))
        return [Seconds(max(7.0, 1 + 0.5 * len(layers)), 2.0)]

    assert miniature.extrapolated(kinds, 2, measure) == [Seconds(41.0, 2.0)]
    assert max(asked) < 80, "it was not built whole"
    slow = miniature.extrapolated(kinds, 2, lambda layers: [Seconds(max(100.0, len(layers)), 2.0)])
    assert slow == [Seconds(100.0, 2.0)], "the host is what takes time in the whole model, too"


def test_layers_leave_the_cache_of_the_device(model: Checkpoint) -> None:
    kinds = miniature.kinds_of(model.config, model.infos)
    large = [replace(info, nbytes=1 << 30) for info in model.infos]
    assert miniature.some_layers(kinds, large) == miniature.FEWEST
    assert miniature.some_layers(kinds, model.infos) * sum(info.nbytes for info in model.infos) > miniature.MUCH


def test_what_seconds_are_kept_by(model: Checkpoint) -> None:
    config = CacheConfig(model.config.layer_specs, 64)
    name = miniature.figure(model, config, 512)
    assert name == miniature.figure(model, replace(config, context=128, max_seqs=4), 512)
    others = [miniature.figure(model, replace(config, codec="int8"), 512), miniature.figure(model, config, 64)]
    model.infos[-1] = replace(model.infos[-1], type="F16")
    others.append(miniature.figure(model, config, 512))
    assert len({name, *others}) == 4
