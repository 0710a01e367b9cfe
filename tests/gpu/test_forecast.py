"""Forecasts of speed on a device: miniatures of models run through the real engine, in the interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu.support.models import write
from support.tiny_models import GOLDEN

from kvarn.cache.plan import CacheConfig
from kvarn.forecast import miniature
from kvarn.forecast.device import speed_on_device
from kvarn.loading.checkpoint import open_checkpoint

SIZE = replace(GOLDEN, n_layers=7, window=6)
WIDE = replace(SIZE, n_heads=8, n_kv_heads=4, hidden=256, feed_forward=512)  # blocks of 256 fit


@pytest.mark.parametrize(("architecture", "type_name", "size"), [("gemma3", "BF16", SIZE), ("llama", "Q4_K", WIDE)])
def test_a_model_that_is_not_loaded(cuda, tmp_path: Path, monkeypatch, architecture: str, type_name: str, size) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(miniature, "MUCH", 0)
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", architecture, type_name, size))
    monkeypatch.setattr(checkpoint, "read_rows", None, raising=True)
    monkeypatch.setattr(checkpoint, "tensor", None, raising=True)
    config, lines = CacheConfig(checkpoint.config.layer_specs, 64), []

    def ask(depths: list[int], fresh: bool = False) -> dict[int, miniature.Seconds]:
        lines.clear()
        return speed_on_device(
            cuda, checkpoint, config, 16, depths, fresh=fresh, progress=lambda *words: lines.append(words)
        )

    first = ask([0, 20])
    assert all(0 < each < 60 for seconds in first.values() for each in seconds)
    n_kinds = 2 if architecture == "gemma3" else 1
    assert lines[-1] == ("measuring the device", n_kinds + 1, n_kinds + 1)
    assert ask([20, 0]) == first
    assert not lines, "it was kept"
    assert ask([0, 20], fresh=True) != first
