"""Forecasts of speed on a device: miniatures of models run through the real engine, in the interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu.support.models import write
from support.tiny_models import GOLDEN

from kvarn import LLM, SamplingParams
from kvarn.backends.cache_settings import cache_config
from kvarn.backends.cuda.backend import Cuda
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.cache.plan import CacheConfig
from kvarn.forecast import miniature, truth
from kvarn.forecast.device import speed_on_device
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.server.planning import Planning

SIZE = replace(GOLDEN, n_layers=7, window=6)
WIDE = replace(SIZE, n_heads=8, n_kv_heads=4, hidden=256, feed_forward=512)  # blocks of 256 fit


def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(truth, "WARM", 1)
    for module in (miniature, truth):
        monkeypatch.setattr(module, "TOKENS", 3)


@pytest.mark.parametrize(("architecture", "type_name", "size"), [("gemma3", "BF16", SIZE), ("llama", "Q4_K", WIDE)])
def test_a_model_that_is_not_loaded(cuda, tmp_path: Path, monkeypatch, architecture: str, type_name: str, size) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(miniature, "MUCH", 0)
    few_tokens(monkeypatch)
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
    assert ask([20], fresh=True)[20] != first[20]


def test_a_server_tells_what_was_measured_before(tmp_path: Path, monkeypatch) -> None:
    from gpu.support.interpreter import InterpretingDriver

    cuda = Cuda(InterpretingDriver(total_bytes=4 << 30), "interpreted", True)
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(miniature, "MUCH", 0)
    few_tokens(monkeypatch)
    path = write(tmp_path / "tiny.gguf", "llama", "BF16", replace(SIZE, n_layers=1))
    llm = LLM(str(path), context=33, max_seqs=2, max_batch_tokens=16, backend=cuda, cache_bytes=1 << 16)
    planning = Planning(llm)
    before = planning.facts()
    assert before["weight_bytes"]["forecast"] == before["device"]["weights"] == weight_bytes(open_checkpoint(path))
    assert before["weight_bytes"]["truth"] == llm.program.nbytes, "with the padding of so small matrices"
    assert before["device"]["total"] == sum(before["device"][key] for key in ("weights", "beside", "cache"))
    assert (before["depths"], before["decode"], before["prefill"]) == (None, None, None)

    checkpoint, depths = open_checkpoint(path), (0, 16, 32)
    config = cache_config(checkpoint.config, str(path), context=33, max_seqs=1, max_batch_tokens=16)
    speed = speed_on_device(cuda, checkpoint, config, 16, depths, fresh=True, progress=lambda *words: None)
    llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
    after = planning.facts()
    assert [each["depth"] for each in after["depths"]] == list(depths)
    assert [1 / each["tok_s"] for each in after["depths"]] == pytest.approx([speed[depth].step for depth in depths])
    told = after["decode"]["tok_s"]
    assert after["decode"]["steps"] == 3
    steps = [speed[depth].step for depth in depths]
    assert min(steps) <= 1 / told["forecast"] <= max(steps)
    assert told["error_share"] == pytest.approx(told["forecast"] / told["truth"] - 1)
    assert after["prefill"]["tok_s"]["forecast"] is None
    assert after["prefill"]["tok_s"]["truth"] > 0
    llm.close()
