"""Vectors of prompts: their numbers, and that batch, chunks, reuse and preemption change no bit."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.null_backend import Null
from support.serving import tiny_model

from kvarn import LLM, AsyncLLM, SamplingParams
from kvarn.engine.explain import explain, in_words
from kvarn.engine.pooling import Pool
from kvarn.errors import BadLogits, KvarnError
from kvarn.loading.own_pooling import own_pooling

LONG = "the sea and the night and a fox " * 6
TEXTS = ["ab of the night", LONG, "the sea", LONG + "again", "ab of the day"]
ANSWER = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(model, **{"cache": "paged", "max_seqs": 4, "context": 320, "block_size": 16} | settings)


def bits(vectors: list[np.ndarray]) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


def states(llm: LLM, text: str) -> np.ndarray:
    """All hidden states of a text, computed in one step outside of the engine."""
    tokens = llm.tokenizer.encode(text)
    llm.cache.open(99)
    llm.cache.reserve(99, len(tokens))
    found = llm.program.hidden(llm.memory, llm.cache.prepare([99]), tokens, range(len(tokens)))
    llm.cache.advance(99, len(tokens))
    llm.cache.free(99)
    return found.astype(np.float64)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_vector_is_the_last_state_or_the_mean_and_has_length_1(model: Path, backend: str) -> None:
    llm = open_llm(model, backend=backend)
    rows = states(llm, TEXTS[0])
    for pooling, wanted in (("last", rows[-1]), ("mean", rows.mean(axis=0))):
        (found,) = llm.embed(TEXTS[0], pooling)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_batch_chunks_reuse_and_preemption_change_no_bit(model: Path, pooling: str) -> None:
    alone = [bits(open_llm(model, max_batch_tokens=512).embed(text, pooling))[0] for text in TEXTS]
    for chunk in (5, 33, 512):
        llm = open_llm(model, max_batch_tokens=chunk)
        assert bits(llm.embed(TEXTS, pooling)) == alone
        assert bits(llm.embed(TEXTS, pooling)) == alone, "now the cache holds the texts"
    tight = open_llm(model, max_batch_tokens=7, cache_bytes=20 * 16 * llm.cache.plan.bytes_per_token)
    answers = [tight.start(text, ANSWER) for text in (LONG[:100], LONG[7:90])]
    assert bits(tight.embed(TEXTS, pooling)) == alone
    for job in answers:
        tight.runner.wait(job)
    assert tight.engine.scheduler.n_preemptions > 0
    tight.cache.check()
    assert tight.cache.usage().sequences == 0


def test_answers_beside_an_embedding_stay_the_same(model: Path) -> None:
    want = open_llm(model).generate(TEXTS, ANSWER)
    llm = open_llm(model)
    jobs = [llm.start(text, ANSWER) for text in TEXTS]
    llm.embed(TEXTS, "mean")
    for job, output in zip(jobs, want, strict=True):
        llm.runner.wait(job)
        assert job.output().tokens == output.tokens


def test_a_prefix_is_reused_for_the_last_state_only(model: Path) -> None:
    llm = open_llm(model)
    llm.embed(LONG)
    prompt = llm.tokenizer.encode(LONG)
    for pooling, reused, said in (("last", len(prompt) - 1, "everything was in the cache"), ("mean", 0, "the mean")):
        job = llm.runner.embed(prompt, pooling)
        llm.runner.wait(job)
        explanation = explain(job.request)
        assert explanation.reused == reused
        assert said in in_words(explanation, str)


def test_errors_fail_the_request_and_free_its_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(model)
    with pytest.raises(KvarnError, match="pooling is 'cls'; it must be one of last, mean"):
        llm.embed("ab", "cls")
    with pytest.raises(KvarnError, match="the prompt is empty"):
        llm.embed([[]])
    with pytest.raises(KvarnError, match="the context holds 320"):
        llm.embed([[5] * 320])
    computed = llm.program.hidden
    monkeypatch.setattr(llm.program, "hidden", lambda *a: computed(*a) * np.nan)
    with pytest.raises(BadLogits, match="not finite"):
        llm.embed("ab")
    monkeypatch.undo()
    assert len(llm.embed("ab")) == 1
    assert llm.cache.usage().sequences == 0


def test_a_failing_step_fails_only_its_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(model)
    other = llm.start("the sea", ANSWER)
    monkeypatch.setattr(llm.program, "hidden", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.embed("ab")
    llm.runner.wait(other)
    assert len(other.output().tokens) == 60
    llm.cache.check()


def test_vectors_can_be_awaited(model: Path) -> None:
    llm = open_llm(model)

    async def ask() -> list[np.ndarray]:
        async with AsyncLLM(llm) as model:
            return [*(await model.embed(TEXTS[:2])), *(await model.embed(llm.tokenizer.encode(TEXTS[2]), "mean"))]

    assert bits(asyncio.run(ask())) == bits([*llm.embed(TEXTS[:2]), *llm.embed(TEXTS[2], "mean")])


def test_every_backend_has_vectors(model: Path) -> None:
    (vector,) = open_llm(model, backend=Null()).embed("ab")
    assert not vector.any(), "its states are zeros"


def test_the_sum_goes_in_order_and_skips_known_rows() -> None:
    rows = np.random.default_rng(1).standard_normal((9, 4)).astype(np.float32)
    whole, parts = Pool("mean"), Pool("mean")
    whole.take(list(rows), 0)
    for first, end in ((0, 4), (2, 6), (6, 9)):
        parts.take(list(rows[first:end]), first)
    assert whole.vector().tobytes() == parts.vector().tobytes()


@pytest.mark.parametrize(
    ("values", "wanted"), [({"llama.pooling_type": 1}, "mean"), ({"llama.pooling_type": 3}, "last"), ({}, "last")]
)
def test_a_gguf_file_says_how_to_pool(values: dict, wanted: str) -> None:
    assert own_pooling(SimpleNamespace(folder=None, metadata={"general.architecture": "llama"} | values)) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [('{"pooling_mode_mean_tokens": true}', "mean"), ('{"pooling_mode_lasttoken": true}', "last"), ("[", "last")],
)
def test_a_folder_says_how_to_pool(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(text)
    assert own_pooling(SimpleNamespace(folder=tmp_path, metadata={})) == wanted
