"""Real models against llama.cpp, and every cache choice against every other.

Golden data: scripts/golden_llamacpp.py (f32 cache, no flash attention). The large models are loaded once per test.
"""

import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import stories
from harness import bits
from llamacpp_rounding import RoundingProgram
from models import material, model, tokenizer

from kvarn import LLM, SamplingParams
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine import Engine
from kvarn.llm import load_weights
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.progress import quiet
from kvarn.scoring import perplexity, score

GOLDEN = Path(__file__).parent / "golden"
SMALL = ("smollm2", "gemma")


def short_of_99(share: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=f"{share} measured; llama.cpp rounds activations to 8 bits, we do not")


def golden(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@lru_cache(maxsize=1)  # the large ones fill gigabytes
def program(name: str) -> ReferenceProgram:
    checkpoint = open_checkpoint(model(name))
    return ReferenceProgram(checkpoint.config, load_weights(checkpoint, quiet))


def cache_for(ready: ReferenceProgram, strategy: str = "contiguous", codec: str = "f32", **more) -> KVCache:
    settings = dict(context=560, max_chunk=512) | more
    return KVCache(CacheConfig(ready.config.layer_specs, strategy=strategy, codec=codec, **settings), Reference())


def agreement(ready: ReferenceProgram, name: str) -> float:
    """Share of positions with our most likely token equal to llama.cpp's, where it leads by more than 0.1 nats."""
    known = golden(name)
    logits = score(ready, cache_for(ready), known["tokens"], 0, 512)[:-1]
    sure = np.array(known["margins"]) > 0.1
    return float((logits.argmax(1) == np.array(known["top1"]))[sure].mean())


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        "qwen",
        pytest.param("gemma", marks=short_of_99("98.97 %")),
        pytest.param("tinyllama", marks=short_of_99("98.70 %")),
    ],
)
def test_item_43_top_1_agrees_with_llama_cpp(name: str) -> None:
    assert agreement(program(name), name) >= 0.99


def test_item_43_a_safetensors_folder_agrees_with_llama_cpp(tmp_path: Path) -> None:
    """stories15M, converted from llama2.c's format: bits of every logit as from the GGUF, tokens as from llama.cpp."""
    checkpoint = open_checkpoint(stories.write_folder(model("stories15m"), tmp_path / "stories"))
    ready = ReferenceProgram(checkpoint.config, load_weights(checkpoint, quiet))
    assert agreement(ready, "stories15m") >= 0.99
    continued_as_by_llama_cpp(ready, "stories15m")


def continued_as_by_llama_cpp(ready: ReferenceProgram, name: str) -> None:
    """Teacher-forced along llama.cpp's greedy text: the same token until its margin first falls below 0.1 nats."""
    for known in golden(name)["greedy"]:
        prompt, tokens, margins = known["prompt_tokens"], known["tokens"], known["margins"]
        sure = next((i for i, margin in enumerate(margins) if margin < 0.1), len(margins))
        logits = score(ready, cache_for(ready), [*prompt, *tokens], len(prompt) - 1, 512)[:-1]
        assert logits.argmax(1)[:sure].tolist() == tokens[:sure], known["prompt"]


@pytest.mark.parametrize("name", ["smollm2", "gemma", "tinyllama"])
def test_item_43_golden_texts(name: str) -> None:
    continued_as_by_llama_cpp(program(name), name)


def choices(name: str) -> list[dict]:
    """Every lossless strategy, layout and block size. (Pinned tokens change what Gemma's local layers see.)"""
    found = [dict(strategy=strategy, pinned=0) for strategy in STRATEGIES]
    found += [dict(strategy="paged", layout=layout) for layout in ("token-major", "head-major", "panel", "repeated")]
    found += [dict(strategy=strategy, block_size=size) for strategy in ("paged", "ring") for size in (16, 32, 64)]
    return found


@pytest.mark.parametrize("name", SMALL)
def test_item_34_logits_are_bit_equal_across_the_cache(name: str) -> None:
    ready, tokens = program(name), golden(name)["tokens"][:70]
    expected = score(ready, cache_for(ready, codec="bf16"), tokens, 0, 512)
    for choice in choices(name):
        ours = score(ready, cache_for(ready, **({"codec": "bf16"} | choice)), tokens, 0, 512)
        assert (bits(ours) == bits(expected)).all(), choice


@pytest.mark.parametrize("name", SMALL)
def test_item_25_logits_are_bit_equal_whatever_the_chunks(name: str) -> None:
    ready, tokens = program(name), golden(name)["tokens"][:70]
    expected = score(ready, cache_for(ready, codec="bf16"), tokens, 0, 512)
    for chunk in (1, 7, 64):
        ours = score(ready, cache_for(ready, "paged", "bf16"), tokens, 0, chunk)
        assert (bits(ours) == bits(expected)).all(), chunk


def test_item_21_a_batch_on_a_real_model_equals_each_alone() -> None:
    llm = LLM(model("smollm2"), cache="paged", context=512, max_seqs=3, max_batch_tokens=40)
    prompts = ["The quick brown fox", "Once upon a time", "def f(x):", "1, 2, 3,", "The quick brown fox is"]
    params = SamplingParams(max_tokens=8, logprobs=1)
    together = llm.generate(prompts, params)
    for prompt, batched in zip(prompts, together, strict=True):
        assert llm.generate(prompt, params)[0].completions == batched.completions


def test_item_36_perplexity_is_that_of_llama_cpp_under_its_rounding() -> None:
    """WikiText-2, 512-token windows, the first 40: 23.5659 by llama.cpp with an f32 cache. Without llama.cpp's 8-bit
    rounding of activations the reference gives 23.5115 (docs/journal.md)."""
    text = material("data/wiki.test.raw").read_text(encoding="utf-8")
    checkpoint = open_checkpoint(model("smollm2"))
    types = {info.name: info.type for info in checkpoint.infos}
    rounding = RoundingProgram(checkpoint.config, load_weights(checkpoint, quiet), types)
    tokens = tokenizer(model("smollm2")).encode(text[:400_000])
    result = perplexity(rounding, cache_for(rounding, context=512), tokens, 512, 40, None, 512)
    assert (result.chunks, result.tokens) == (40, 40 * 255)
    assert math.isclose(result.ppl, 23.5659, abs_tol=0.05)


@pytest.mark.parametrize(("bos", "prompt"), [(False, 5), (True, 6)])
def test_item_24_tinyllamas_quick_brown_fox(bos: bool, prompt: int) -> None:
    """Five tokens without BOS, six with; the cache ends with prompt + generated - 1."""
    tokens = tokenizer(model("tinyllama")).encode("The quick brown fox", bos=bos)
    assert len(tokens) == prompt
    ready = program("tinyllama")
    engine = Engine(ready, cache_for(ready, context=64), 64)
    request = engine.add(tokens, SamplingParams(max_tokens=5))
    while engine.busy:
        engine.step()
    assert request.samples[0].computed == prompt + 5 - 1
    assert engine.cache.counters.calls == {"prefill": 22, "decode": 4 * 22}
