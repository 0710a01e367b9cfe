"""The engine on tiny random models: whatever happens around a request, its tokens are the same."""

import itertools
import random
from functools import cache

import numpy as np
import pytest
from support import tiny
from support.harness import Driven, bits, score
from support.tiny import (
    CONTEXT,
    GREEDY,
    PROMPTS,
    VOCAB,
    alone,
    blocks_of_16,
    config_of,
    engine_of,
    finish,
    program_of,
)

from kvarn.backends.reference import Reference
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.strategy import NAMES
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError, PromptTooLong
from kvarn.models.families import FAMILIES

SEEDED = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.95, seed=7)
TEXT = random.Random(1).choices(range(VOCAB), k=150)
THOROUGH = "gemma3"  # two groups of layers, one of them with a window: every layout, too


def logits(architecture: str, chunk: int, n: int = len(TEXT), **cache) -> np.ndarray:
    """[n, vocabulary] of the text in chunks. (Pinned tokens would change what Gemma's local layers see.)"""
    program = program_of(architecture)
    config = CacheConfig(program.config.layer_specs, CONTEXT, max_chunk=len(TEXT), pinned=0, **cache)
    return score(program, Driven(config, Reference()), TEXT[:n], 0, chunk)


@cache
def expected(architecture: str) -> np.ndarray:
    whole = logits(architecture, len(TEXT), strategy="contiguous", layout="token-major", codec="bf16")
    assert np.isfinite(whole).all()
    assert len({int(row.argmax()) for row in whole}) > 4, "the model says something"
    return whole


def choices() -> list:
    """One layout per strategy: test_conformance.py proves layouts equal one layer below. All of them on one model."""
    found = []
    for architecture, strategy in itertools.product(FAMILIES, NAMES):
        for layout in (None, *LAYOUTS) if architecture == THOROUGH else (None,):
            for block_size, chunk in ((None, 150), (None, 7), (16, 64), (64, 64)):
                cache = dict(strategy=strategy, layout=layout, block_size=block_size, codec="bf16")
                try:
                    plan(CacheConfig(config_of(architecture).layer_specs, CONTEXT, max_chunk=150, pinned=0, **cache))
                except KvarnError:
                    continue
                name = "-".join(str(part) for part in (architecture, strategy, layout, block_size, chunk) if part)
                found.append(pytest.param(architecture, chunk, cache, id=name))
    return found


@pytest.mark.requirement(34)
@pytest.mark.parametrize(("architecture", "chunk", "cache"), choices())
def test_logits_are_the_same_bits_whatever_the_cache(architecture: str, chunk: int, cache: dict) -> None:
    """The whole [T, vocabulary] array as integers."""
    assert (bits(logits(architecture, chunk, **cache)) == bits(expected(architecture))).all()


@pytest.mark.requirement(25)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_token_by_token_is_one_piece(architecture: str) -> None:
    one, whole = (logits(architecture, chunk, n=60, strategy="paged", codec="f32") for chunk in (1, 60))
    assert (bits(one) == bits(whole)).all()


@cache
def alone_once(prompt: tuple[int, ...], seeded: bool, computing: bool) -> list[int]:
    """`computing` is read by `alone`: the null backend has answers of its own."""
    assert computing == tiny.computing
    return alone(list(prompt), SEEDED if seeded else GREEDY)


@pytest.mark.any_backend
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batched_equals_alone(strategy: str, params: SamplingParams) -> None:
    engine = engine_of(strategy=strategy, max_seqs=6, max_batch_tokens=48)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    finish(engine)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.samples[0].output == alone_once(tuple(prompt), params is SEEDED, tiny.computing)
        assert request.samples[0].finish_reason == "length"
    assert engine.cache.usage().blocks_used == 0


@pytest.mark.any_backend
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_and_prefix_hits_do_not_change_a_token(params: SamplingParams) -> None:
    """A cache of 22 blocks of 16 for seven requests of 36 to 149 tokens, many with a common beginning."""
    engine = engine_of(max_seqs=5, max_batch_tokens=32, block_size=16, cache_bytes=blocks_of_16(22))
    start = PROMPTS[4][:70]
    prompts = [*PROMPTS[2:], [*start, 1], [*start, 2, 3], [*start, 2, 3, 4, 5]]
    requests = [engine.add(prompt, params) for prompt in prompts]
    finish(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.samples[0].output == alone(prompt, params), len(prompt)
    assert engine.scheduler.n_preemptions > 0
    assert engine.cache.usage().prefix_hits > 64
    assert sum(request.preemptions for request in requests) == engine.scheduler.n_preemptions


def test_parallel_samples_fork_the_prompt() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, n=4)
    engine = engine_of(max_seqs=4)
    request = engine.add(PROMPTS[4], params)
    finish(engine)
    outputs = [sample.output for sample in request.samples]
    assert len({tuple(output) for output in outputs}) > 1
    assert engine.stats.prompt_tokens == 100, "the prompt was computed once"
    assert engine.stats.generated_tokens == 4 * 12
    for strategy, max_seqs in (("contiguous", 4), ("ring", 4), ("paged", 2), ("contiguous", 1)):
        other = engine_of(strategy=strategy, max_seqs=max_seqs)  # with fewer rows than samples some wait their turn
        again = other.add(PROMPTS[4], params)
        finish(other)
        assert [sample.output for sample in again.samples] == outputs, (strategy, max_seqs)


@pytest.mark.requirement(24)
def test_the_cache_holds_prompt_and_generated_tokens_less_one() -> None:
    engine = engine_of(strategy="contiguous", max_seqs=1)
    request = engine.add(PROMPTS[1], SamplingParams(max_tokens=5))
    held = []
    while engine.busy:
        engine.step()
        held.append(request.samples[0].computed)
    assert held == [5, 6, 7, 8, 9], "prompt + generated - 1"
    assert engine.memory.counters.calls == {"prefill": 3, "decode": 4 * 3}


@pytest.mark.requirement(29)
def test_a_mixed_step_calls_each_kernel_once_per_layer() -> None:
    engine = engine_of()
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    engine.add(PROMPTS[2], GREEDY)
    before = dict(engine.memory.counters.calls)
    engine.step()
    assert engine.memory.counters.calls["prefill"] - before.get("prefill", 0) == 3
    assert engine.memory.counters.calls["decode"] - before["decode"] == 3


@pytest.mark.any_backend
def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    engine = engine_of(max_batch_tokens=16, max_seqs=2)
    first = engine.add(PROMPTS[1], SamplingParams(max_tokens=40))
    engine.step()
    engine.add(PROMPTS[5], GREEDY)  # 129 tokens in chunks of at most 15
    for _ in range(9):
        before = len(first.samples[0].output)
        engine.step()
        assert len(first.samples[0].output) == before + 1


@pytest.mark.any_backend
def test_cancelling_frees_blocks_at_once() -> None:
    for moment in range(4):
        engine = engine_of()
        requests = [engine.add(prompt, SamplingParams(max_tokens=50, n=2)) for prompt in PROMPTS[2:4]]
        for _ in range(moment):
            engine.step()
        for request in requests:
            engine.cancel(request)
            engine.cancel(request)
            assert all(sample.finish_reason == "cancelled" for sample in request.samples)
        assert not engine.busy
        assert engine.cache.usage().sequences == engine.cache.usage().blocks_used == 0
        engine.cache.check()


def test_stop_tokens_and_end_tokens() -> None:
    output = alone(PROMPTS[3])
    third = output[2]
    for params, length in (
        (SamplingParams(max_tokens=20, stop_token_ids=[third]), output.index(third) + 1),
        (SamplingParams(max_tokens=7), 7),
    ):
        assert len(alone(PROMPTS[3], params)) == length
    engine = engine_of(eos_ids=[third])
    ends = engine.add(PROMPTS[3], GREEDY)
    goes_on = engine.add(PROMPTS[3], SamplingParams(max_tokens=20, ignore_eos=True))
    finish(engine)
    assert ends.samples[0].finish_reason == "stop"
    assert ends.samples[0].output == output[: output.index(third) + 1]
    assert goes_on.samples[0].output == output


@pytest.mark.any_backend
def test_the_context_ends_an_answer() -> None:
    engine = engine_of(context=128, max_seqs=1)
    request = engine.add(PROMPTS[4], SamplingParams(max_tokens=500))
    finish(engine)
    assert request.samples[0].finish_reason == "length"
    assert request.samples[0].limit == "context"
    assert len(request.samples[0].tokens) == 128, "prompt and answer together"


@pytest.mark.any_backend
def test_what_can_never_be_served_is_refused_with_the_numbers() -> None:
    engine = engine_of(context=128)
    refusals = {
        "the prompt is empty": [],
        "the prompt has 128 tokens and the context holds 128": [1] * 128,
        "a token outside the vocabulary of 101": [1, 101],
    }
    for message, prompt in refusals.items():
        with pytest.raises(KvarnError, match=message):
            engine.add(prompt, GREEDY)
    engine.check_length(127)
    with pytest.raises(PromptTooLong, match="the prompt has at least 128 tokens and the context holds 128: shorten"):
        engine.check_length(128, at_least=True)
    small = engine_of(block_size=16, cache_bytes=blocks_of_16(4))
    with pytest.raises(KvarnError, match="the prompt has 64 tokens and the whole cache holds 64"):
        small.add([1] * 64, GREEDY)
    request = small.add([1] * 60, SamplingParams(max_tokens=50))
    finish(small)
    assert len(request.samples[0].tokens) == 64
    assert not engine.busy


@pytest.mark.any_backend
def test_a_request_that_waits_for_room_is_one_query_of_the_prefix_cache() -> None:
    """Admission is tried at every step; only what is computed counts."""
    engine = engine_of(strategy="paged", block_size=16, max_seqs=3, cache_bytes=blocks_of_16(7))
    for prompt in ([1] * 100, [2] * 90):
        engine.add(prompt, SamplingParams(max_tokens=10))
    finish(engine)
    assert engine.scheduler.n_preemptions == 0
    assert engine.cache.usage().prefix_queries == 190
    assert sum(engine.cache.usage().prefix_misses.values()) == 2


@pytest.mark.any_backend
def test_a_second_turn_reuses_the_first() -> None:
    engine = engine_of()
    first = engine.add(PROMPTS[4], GREEDY)
    finish(engine)
    history = first.samples[0].tokens
    second = engine.add([*history, 5, 6, 7], GREEDY)
    finish(engine)
    assert second.adoption is not None
    assert second.adoption.reused == len(history) - 1, "all that was computed, to the token"
    assert second.samples[0].output == alone([*history, 5, 6, 7])
    assert engine.stats.cached_tokens == second.adoption.reused
