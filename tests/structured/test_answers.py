"""Answers of a model with random weights: they follow their structure, and nothing but the structure shows."""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support import tiny_gguf
from support.models import model as real_model
from support.schemas_by_chance import schema

from kvarn import LLM, AsyncLLM, KvarnError, SamplingParams
from kvarn.engine.engine import Engine
from kvarn.errors import BadStructure

CASES = int(os.environ.get("KVARN_SCHEMA_CASES", "500"))
RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["id", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["a", "Once upon a time there was", "x" * 70, "Once upon a time there was a dog"]
ENDS = {ord(character): 4.0 for character in '"}]'}  # makes strings and lists short


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", tiny_gguf.CHAT)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, cache="paged", max_seqs=16, block_size=16) as llm:
        yield llm


def params(i: int, **settings: Any) -> SamplingParams:
    structures: list[dict[str, Any]] = [
        {"json_schema": RECORD, "logit_bias": ENDS},
        {"regex": "[a-z]{3,20}( [0-9]+)?"},
        {"choice": ["yes", "yesterday", "no"]},
        {"grammar": 'root ::= "(" root ")" | [a-c]+'},
        {},
    ]
    return SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": 60, **structures[i % 5], **settings})


def answers(llm: LLM, prompts: list[str], each: list[SamplingParams]) -> list[list[tuple[list[int], str, str | None]]]:
    outputs = llm.generate(prompts, each)
    return [[(c.tokens, c.text, c.finish_reason) for c in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[tuple[list[int], str, str | None]]]:
    """Twenty answers with two samples each, one request at a time, without any sharing."""
    with LLM(path, cache="contiguous", max_seqs=2) as llm:
        return [answers(llm, [PROMPTS[i % 4]], [params(i, n=2)])[0] for i in range(20)]


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "paged", "max_seqs": 16, "block_size": 16},
        {"cache": "paged", "max_seqs": 4, "block_size": 16, "max_batch_tokens": 16},
        {"cache": "paged", "max_seqs": 8, "block_size": 16, "cache_bytes": 250_000},
    ],
    ids=["batched", "chunked", "preempted"],
)
def test_batches_chunks_forks_and_preemption_change_no_bit(path: Path, alone: Any, settings: dict[str, Any]) -> None:
    with LLM(path, **settings) as llm:
        found = answers(llm, [PROMPTS[i % 4] for i in range(20)], [params(i, n=2) for i in range(20)])
        if "cache_bytes" in settings:
            assert llm.engine.scheduler.n_preemptions > 0
    assert found == alone


def test_a_step_that_is_repeated_changes_no_bit(path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program fails after sampling, so every sample draws its token again."""
    with LLM(path, cache="paged", max_seqs=16, block_size=16) as llm:
        take, failures = Engine._take, iter([7, 23, 40])
        due, steps = next(failures), 0

        def failing(self: Engine, *given: Any) -> Any:
            nonlocal due, steps
            steps += 1
            if steps == due:
                due = next(failures, -1)
                raise ZeroDivisionError("once")
            return take(self, *given)

        monkeypatch.setattr(Engine, "_take", failing)
        jobs = [llm.start(PROMPTS[i % 4], params(i, n=2)) for i in range(20)]
        llm.runner.advance(lambda: all(job.done for job in jobs))
    kept = [i for i, job in enumerate(jobs) if job.request.error is None]
    assert len(kept) > 10
    for i in kept:
        found = [(c.tokens, c.text, c.finish_reason) for c in jobs[i].output().completions]
        assert found == alone[i]


def test_a_complete_structure_ends_the_answer(llm: LLM) -> None:
    for settings in ({}, {"ignore_eos": True}):
        (output,) = llm.generate("a", choice=["yes", "no"], n=4, seed=1, temperature=2.0, **settings)
        for each in output.completions:
            assert (each.text in ("yes", "no"), each.finish_reason) == (True, "stop")
            assert len(each.tokens) == len(each.text), "no step for the end token"


def test_an_end_token_ends_a_structure_that_could_go_on(llm: LLM) -> None:
    end = llm.tokenizer.eos_ids[0]
    for ignore in (False, True):
        (output,) = llm.generate("a", regex="[0-9]+", logit_bias={end: 1e6}, max_tokens=9, ignore_eos=ignore)
        assert output.finish_reason == "stop"
        assert output.text.isdigit()
        assert output.tokens[-1] == end
        assert len(output.tokens) == 2, "the end token was forbidden before the first digit"


def test_an_answer_that_is_cut_off_says_length(llm: LLM) -> None:
    (output,) = llm.generate("a", regex="[a-z]{50}", max_tokens=10)
    assert (output.finish_reason, len(output.text)) == ("length", 10)
    (output,) = llm.generate("a", regex="[a-z]{10}", max_tokens=10)
    assert output.finish_reason == "stop", "complete with the last token that it may have"


def test_stop_texts_do_not_cut_a_structure(llm: LLM) -> None:
    (output,) = llm.generate("a", regex="[0-9]{3},[0-9]{3}", stop=[",", "1"])
    assert len(output.text) == 7
    assert output.finish_reason == "stop"


def test_penalties_and_biases_never_allow_a_forbidden_token(llm: LLM) -> None:
    loved = dict.fromkeys(range(20, 200), 1000000000.0)
    settings = {"repetition_penalty": 50.0, "frequency_penalty": -2.0, "logit_bias": loved, "temperature": 5.0}
    for seed in range(5):
        (output,) = llm.generate("a", regex="[ab]{12}", top_k=40, min_p=0.0, seed=seed, **settings)
        assert set(output.text) <= {"a", "b"}


def test_logprobs_are_those_of_the_model_before_the_mask(llm: LLM) -> None:
    (free,) = llm.generate("a", max_tokens=1, logprobs=5)
    (bound,) = llm.generate("a", regex="[0-9]", logprobs=5, logit_bias={50: 3.0})
    assert free.completions[0].logprobs[0].top == bound.completions[0].logprobs[0].top
    assert bound.completions[0].logprobs[0].logprob < free.completions[0].logprobs[0].top[0][1]


def test_a_processor_and_a_structure_that_agree_on_no_token_fail_the_request(llm: LLM) -> None:
    def no_digits(output: list[int], scores: Any) -> None:
        scores[48:58] = -float("inf")

    with pytest.raises(KvarnError, match="allows no token"):
        llm.generate("a", regex="[0-9]", logits_processors=no_digits)
    assert not llm.engine.busy


def test_a_bad_structure_is_refused_before_the_engine_sees_it(llm: LLM) -> None:
    with pytest.raises(BadStructure, match=r'prompt 1 of 2.*"not"'):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(json_schema={"not": {}})])
    assert not llm.engine.busy


def test_streams_and_asyncio_follow_structures(llm: LLM, path: Path) -> None:
    chosen = params(0)
    (output,) = llm.generate("a", chosen)
    assert "".join(llm.stream("a", chosen)) == output.text
    assert llm.chat("a", regex="[xy]{3}").text in {a + b + c for a in "xy" for b in "xy" for c in "xy"}

    async def ask() -> str:
        async with AsyncLLM(llm) as other:
            return (await other.generate("a", chosen))[0].text

    assert asyncio.run(ask()) == output.text


def check(schemas: list[dict[str, Any]], outputs: list[Any]) -> int:
    """Every finished answer is valid. Returns how many finished."""
    finished = 0
    for each, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "stop":
            finished += 1
            value = json.loads(output.text)
            assert jsonschema_rs.is_valid(each, value, validate_formats=True), (each, output.text)
        else:
            assert output.finish_reason == "length"
    return finished


def test_finished_answers_are_valid_json_of_generated_schemas(llm: LLM) -> None:
    """KVARN_SCHEMA_CASES=5000 for more."""
    rng = random.Random(7)
    schemas = [schema(rng) for _ in range(CASES)]
    chosen, used = [], []
    for i, each in enumerate(schemas):
        made = SamplingParams(json_schema=each, logit_bias=ENDS, temperature=1.5, seed=i, max_tokens=150)
        try:
            llm.runner.compiler.compile(made.structure)  # type: ignore[arg-type]
        except BadStructure:
            continue
        chosen.append(made)
        used.append(each)
    assert len(used) > 0.9 * CASES
    finished = check(used, llm.generate(["a"] * len(used), chosen))
    assert finished > 0.8 * len(used)


def test_finished_answers_of_the_default_model_are_valid() -> None:
    rng = random.Random(8)
    n = 100 if os.environ.get("KVARN_TEST_MATERIAL") else 10
    schemas = []
    with LLM(real_model("smollm2"), cache="paged", context=512, max_seqs=16) as llm:
        while len(schemas) < n:
            each = schema(rng)
            try:
                llm.runner.compiler.compile(SamplingParams(json_schema=each).structure)  # type: ignore[arg-type]
                schemas.append(each)
            except BadStructure:
                continue
        chosen = [SamplingParams(json_schema=each, max_tokens=60) for each in schemas]
        finished = check(schemas, llm.generate(["A small example of JSON:\n"] * n, chosen))
    assert finished > 0.5 * n
