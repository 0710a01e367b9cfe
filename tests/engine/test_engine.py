"""The engine on tiny random models: whatever happens around a request, its tokens are the same."""

import random

import numpy as np
import pytest
from support.harness import Driven, bits, score
from support.tiny import (
    CONTEXT,
    GREEDY,
    PROMPTS,
    VOCAB,
    alone,
    blocks_of_16,
    engine_of,
    finish,
    program_of,
)

from kvarn.backends.reference import Reference
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.strategy import NAMES
from kvarn.engine.request import SamplingParams
from kvarn.errors import KvarnError, PromptTooLong
from kvarn.models.families import FAMILIES

SEEDED = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.95, seed=7)


def tokens_of(n: int) -> list[int]:
    """The same for every architecture and whatever ran before."""
    rng = random.Random(1)
    return [rng.randrange(VOCAB) for _ in range(n)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_item_34_logits_are_the_same_bits_whatever_the_cache(architecture: str) -> None:
    """Every strategy, layout, block size and chunk size: the whole [T, vocabulary] array as integers."""
    program, tokens = program_of(architecture), tokens_of(150)
    expected = None
    for strategy in NAMES:
        for layout in (None, *LAYOUTS):
            for block_size in (None, 16, 64):
                settings = dict(max_chunk=150, pinned=0)  # pinned tokens change what Gemma's local layers see
                config = CacheConfig(
                    program.config.layer_specs, CONTEXT, strategy, "bf16", layout, block_size, **settings
                )
                try:
                    plan(config)
                except KvarnError:
                    continue
                for chunk in (150, 7) if block_size is None else (64,):
                    logits = score(program, Driven(config, Reference()), tokens, 0, chunk)
                    expected = logits if expected is None else expected
                    assert (bits(logits) == bits(expected)).all(), (strategy, layout, block_size, chunk)
    assert expected is not None
    assert np.isfinite(expected).all()
    assert len({int(row.argmax()) for row in expected}) > 4, "the model says something"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_item_25_token_by_token(architecture: str) -> None:
    program, tokens = program_of(architecture), tokens_of(60)
    caches = [
        Driven(CacheConfig(program.config.layer_specs, CONTEXT, "paged", "f32", max_chunk=60), Reference())
        for _ in range(2)
    ]
    assert (bits(score(program, caches[0], tokens, 0, 1)) == bits(score(program, caches[1], tokens, 0, 60))).all()


@pytest.mark.any_backend
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batched_equals_alone(strategy: str, params: SamplingParams) -> None:
    engine = engine_of(strategy=strategy, max_seqs=6, max_batch_tokens=48)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    finish(engine)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.samples[0].output == alone(prompt, params)
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


def test_item_24_cached_tokens_and_kernel_calls() -> None:
    engine = engine_of(strategy="contiguous", max_seqs=1)
    request = engine.add(PROMPTS[1], SamplingParams(max_tokens=5))
    held = []
    while engine.busy:
        engine.step()
        held.append(request.samples[0].computed)
    assert held == [5, 6, 7, 8, 9], "prompt + generated - 1"
    assert engine.memory.counters.calls == {"prefill": 3, "decode": 4 * 3}


def test_item_29_a_mixed_step_calls_each_kernel_once_per_layer() -> None:
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
        (SamplingParams(max_tokens=20, stop_tokens=[third]), output.index(third) + 1),
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
    assert len(request.samples[0].tokens) == 129, "the last token needs no place in the cache"


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
    assert len(request.samples[0].tokens) == 65
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
