"""Counters say which kernels ran, how often, and that the native code was one of them.

A step adds n_layers to `prefill` if any sequence has more than one new token, and n_layers to `decode` if any has
exactly one.
"""

import pytest
from support.harness import Driven, backend, chunks, drive, inputs, run, using

from kvarn import native
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

SPEC = LayerSpec(8, 1, 8, 8)


@pytest.mark.requirement(24)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("prompt", "cached"), [(5, 9), (6, 10)])
def test_a_prompt_is_one_prefill_and_each_generated_token_one_decode(strategy: str, prompt: int, cached: int) -> None:
    """Five generated tokens: the last one is never written, so the cache holds prompt + generated - 1."""
    spec, layers = LayerSpec(4, 2, 8, 8), 3
    cache = Driven(CacheConfig([spec] * layers, 32, strategy, "f32"), backend())
    data = {(0, layer): inputs(spec, prompt + 4, seed=layer) for layer in range(layers)}
    drive(cache, [{0: prompt}] + [{0: 1}] * 4, data)
    assert cache.length(0) == cached == cache.usage().tokens
    assert cache.counters.calls == {"prefill": layers, "decode": 4 * layers}


@pytest.mark.requirement(24, 29)
@pytest.mark.usefixtures("backend")
def test_a_mixed_step_calls_both_kernels_once_per_layer() -> None:
    config = CacheConfig([LayerSpec(4, 2, 8, 8)] * 3, 64, "paged", "f32", max_seqs=3)
    _, cache = run(config, [{0: 9, 1: 1, 2: 4}])
    assert cache.counters.calls == {"prefill": 3, "decode": 3}
    _, cache = run(config, [{0: 1, 1: 1, 2: 1}])
    assert cache.counters.calls == {"decode": 3}


@pytest.mark.requirement(29, 54)
@pytest.mark.parametrize("codec", [name for name in CODECS if hasattr(native, f"encode_{name}")])
def test_writes_of_the_cache_run_the_native_encoder(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the native encoder and the cache's write must break with it."""
    calls = []
    real = getattr(native, f"encode_{codec}")
    monkeypatch.setattr(native, f"encode_{codec}", lambda *args: (calls.append(codec), real(*args)))
    with using("reference"):
        _, cache = run(CacheConfig([SPEC], 64, "paged", codec), chunks(0, 31, 1))
    assert len(calls) == (2 if CODECS[codec].tail else 4), "K and V of two steps, or of one that fills a tile"
    assert cache.counters.calls == {"prefill": 1, "decode": 1}
