"""Defaults of sampling, the model's own settings, and the length of the context."""

from pathlib import Path

import pytest
from support import tiny_gguf
from support.serving import tiny_model
from support.tiny_files import write_hf

from kvarn import LLM, KvarnError
from kvarn.engine.params import chat_defaults
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.own_sampling import own_sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, cache="paged", max_seqs=4, max_batch_tokens=32, block_size=16, context=320)


def test_chat_draws_and_text_is_greedy_by_default(llm: LLM) -> None:
    assert llm.chat_defaults["temperature"] == 0.7
    assert llm.chat_defaults["top_p"] == 0.95
    texts = {tuple(llm.chat("ab", max_tokens=12, ignore_eos=True, seed=seed).tokens) for seed in range(4)}
    assert len(texts) > 1, "not greedy"
    same = {tuple(llm.generate("ab", max_tokens=12, seed=seed)[0].tokens) for seed in range(4)}
    assert len(same) == 1
    assert chat_defaults({"temperature": 0.0})["temperature"] == 0.7, "never greedy"


def test_the_models_own_settings_are_the_defaults_of_chat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {
        "general.sampling.temp": ("f32", 0.6),
        "general.sampling.top_k": ("i32", 20),
        "general.sampling.min_p": ("f32", 7.0),
        "general.sampling.penalty_repeat": ("f32", 1.05),
    }
    path = tiny_gguf.write(tmp_path / "own.gguf", "llama", tiny_gguf.CHAT, keys=keys)
    own = own_sampling(open_checkpoint(path))
    assert own == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert "general.sampling.min_p is 7.0, which is out of range" in caplog.text
    defaults = LLM(path, context=64).chat_defaults
    assert {name: defaults[name] for name in own} == own
    assert (defaults["top_p"], defaults["min_p"]) == (0.95, 0.0)


@pytest.mark.parametrize(
    ("content", "own"),
    [
        ('{"temperature": 0.6, "top_k": -1, "do_sample": true}', {"temperature": 0.6, "top_k": 0}),
        ('{"temperature": null, "top_p": "x", "top_k": 1.5, "min_p": NaN}', {}),
        ('{"temperature": true, "repetition_penalty": -1, "top_p": 1e400}', {}),
        ("[1]", {}),
        ("{", {}),
        ("[" * 100_000, {}),
        (None, {}),
    ],
)
def test_a_folders_generation_config(tmp_path: Path, content: str | None, own: dict[str, float]) -> None:
    folder = write_hf(tmp_path, "llama")
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    assert own_sampling(open_checkpoint(folder)) == own


def test_prompt_and_answer_fill_the_context_and_no_more(llm: LLM) -> None:
    (cut,) = llm.generate("ab", max_tokens=10_000, ignore_eos=True)
    assert cut.prompt_tokens + len(cut.tokens) == 320
    assert (cut.finish_reason, cut.completions[0].limit) == ("length", "context")
    (short,) = llm.generate("ab", max_tokens=4, ignore_eos=True)
    assert (short.finish_reason, short.completions[0].limit) == ("length", "max_tokens")
    (last,) = llm.generate([97] * 319, max_tokens=10, ignore_eos=True)
    assert (len(last.tokens), last.completions[0].limit) == (1, "context")
    with pytest.raises(KvarnError, match="the prompt has 320 tokens and the context holds 320"):
        llm.generate([97] * 320)


@pytest.mark.parametrize("cache", ["ring", "sinks"])
def test_a_ring_goes_on_to_the_context_of_the_model(model: Path, cache: str) -> None:
    rolling = LLM(model, cache=cache, context=64, max_seqs=1, max_batch_tokens=64)
    (output,) = rolling.generate("ab of the night", max_tokens=10_000, ignore_eos=True)
    assert output.prompt_tokens + len(output.tokens) == 512
    assert output.completions[0].limit == "context"
    same = LLM(model, cache="sliding", window=64, pinned=4 if cache == "sinks" else 0, context=512, max_seqs=1)
    assert same.generate("ab of the night", max_tokens=10_000, ignore_eos=True)[0].tokens == output.tokens
    assert rolling.cache.plan.nbytes < same.cache.plan.nbytes


def test_a_longer_context_than_the_models_is_refused_with_the_remedy(model: Path) -> None:
    for cache in ("paged", "ring"):
        with pytest.raises(KvarnError, match="trained for 512 tokens; give at most that"):
            LLM(model, cache=cache, context=513)
