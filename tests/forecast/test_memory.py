"""Forecasts of memory are what is allocated: every part that kvarn allocates itself, byte by byte."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_gguf import CHAT, SIZES, VARIANTS, write
from support.tiny_models import GOLDEN

from kvarn import LLM
from kvarn.backends.cache_settings import cache_config
from kvarn.backends.cpu import Cpu
from kvarn.cache.codec import CODECS
from kvarn.cache.strategy import STRATEGIES
from kvarn.forecast.memory import Beside, resident_bytes, vocabulary_bytes
from kvarn.forecast.outlined import Outlined
from kvarn.forecast.truth import held_bytes, written_bytes
from kvarn.loading.checkpoint import open_checkpoint

SETTINGS = {"context": 96, "max_seqs": 2, "max_batch_tokens": 32}


def tiny(folder: Path, variant: str) -> Path:
    """A model that text can be given to."""
    return write(folder / "tiny.gguf", variant, CHAT, replace(SIZES.get(variant, GOLDEN), context=512))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_workspace_are_those_of_the_loaded_model(tmp_path: Path, variant: str) -> None:
    path, backend = tiny(tmp_path, variant), Cpu()
    model = Outlined.of_headers(open_checkpoint(path), backend, 32, process=0)
    config = cache_config(model.config, "tiny", cache="paged", **SETTINGS)
    forecast = model.memory(model.plan(config))
    with LLM(path, cache="paged", backend=backend, **SETTINGS) as llm:
        llm.generate([[1 + i] * 70 for i in range(2)], max_tokens=20, ignore_eos=True)
        assert forecast.weights == llm.program.nbytes
        assert forecast.workspace == llm.program.workspace
        assert forecast.cache == cache_memory(llm)
        vocabulary = vocabulary_bytes(llm.config.vocab_size, llm.tokenizer.is_sentence_piece)
        again = Outlined.of_loaded(llm.program, backend, 32, Beside(0, vocabulary))
        assert again.memory(llm.cache.plan) == forecast
        assert again.work == model.work
    parts = (forecast.process, forecast.vocabulary, forecast.bookkeeping, forecast.pages)
    assert forecast.total == forecast.weights + forecast.cache + forecast.workspace + sum(parts)
    assert sum(forecast.kinds.values()) < forecast.weights, "vectors are no matrices"


def cache_memory(llm: LLM) -> int:
    host = llm.memory.host
    return host.arena.nbytes + sum(table.blocks.nbytes + table.first.nbytes for table in host.tables)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_cache_of_every_strategy_and_codec(tmp_path: Path, strategy: str, codec: str) -> None:
    path, backend = tiny(tmp_path, "gemma3"), Cpu()
    model = Outlined.of_headers(open_checkpoint(path), backend, 32, process=0)
    settings = {
        **SETTINGS,
        "cache": strategy,
        "cache_type": codec,
        "window": 24 if STRATEGIES[strategy].windowed else None,
    }
    forecast = model.memory(model.plan(cache_config(model.config, "tiny", **settings)))
    with LLM(path, backend=backend, **settings) as llm:
        assert forecast.cache == cache_memory(llm)


def test_what_is_held_counts_cells_that_are_not_written(tmp_path: Path) -> None:
    path = tiny(tmp_path, "llama")
    with LLM(path, backend="cpu", cache_bytes=64 << 20, context=256, cache="paged") as llm:
        arena = llm.memory.host.arena
        before, held = written_bytes(arena.ctypes.data, arena.nbytes), held_bytes(llm.memory)
        assert before < arena.nbytes
        arena[:] = 0
        assert written_bytes(arena.ctypes.data, arena.nbytes) == arena.nbytes
        assert held is not None
        assert abs(held_bytes(llm.memory) - held) < 8 << 20, "the same, before and after"
    assert resident_bytes() > 1 << 20
