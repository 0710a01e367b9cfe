"""A fault fails one request and no other; a full queue refuses; the gap between two decoded tokens is bounded."""

import itertools

import numpy as np
import pytest
from support import tiny
from support.tiny import PROMPTS, alone, blocks_of_16, engine_of, finish, program_of

from kvarn.engine.explain import explain
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError, QueueFull

POISON = 99
SHORT = SamplingParams(max_tokens=8)
CLEAN = [[token % 90 for token in prompt] for prompt in PROMPTS]


class Failing:
    """A program that fails on one token."""

    def __init__(self) -> None:
        self._program = program_of()
        self.config = self._program.config

    def run(self, memory, step, tokens, wanted):
        if POISON in tokens:
            raise RuntimeError("a kernel failed")
        return self._program.run(memory, step, tokens, wanted)


class BrokenConstraint:
    """Raises inside the sampler."""

    def mask(self, scores, output) -> None:
        raise ZeroDivisionError("sampling")

    def complete(self, output) -> bool:
        raise AssertionError("no token was sampled")


def drive(engine) -> None:
    for _ in range(2000):
        if not engine.busy:
            break
        try:
            engine.step()
        except RuntimeError as error:
            engine.isolate(error)
        engine.cache.check()
    assert not engine.busy


@pytest.mark.parametrize("place", [0, 20, 99])
def test_a_step_that_fails_ends_only_the_request_at_fault(place: int) -> None:
    """In the first chunk or in the last: the other answers are the same to the token."""
    engine = engine_of(Failing(), max_batch_tokens=32, max_seqs=6)
    unbiased = SamplingParams(max_tokens=8, logit_bias={POISON: -1000.0})
    poisoned = [*CLEAN[4]]
    poisoned[place] = POISON
    requests = [engine.add(prompt, unbiased) for prompt in (*CLEAN[:3], poisoned, *CLEAN[3:])]
    drive(engine)
    failed = requests.pop(3)
    assert failed.samples[0].finish_reason == "error"
    assert str(failed.error) == "a kernel failed"
    for prompt, request in zip(CLEAN, requests, strict=True):
        assert request.error is None
        assert request.samples[0].output == alone(prompt, unbiased)
    assert engine.cache.usage().sequences == 0


@pytest.mark.parametrize("at", range(4, 16))
def test_requests_that_do_not_fit_together_run_alone_after_a_fault(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails once, in a cache that holds any one of three long prompts but not all. Requests that ran alone
    without failing are preempted for the next one; otherwise none would move again."""
    engine = engine_of(Failing(), max_batch_tokens=32, max_seqs=4, block_size=16, cache_bytes=blocks_of_16(13))
    unbiased = SamplingParams(max_tokens=20, logit_bias={POISON: -1000.0})
    prompts = [[(7 * i + k) % 90 for i in range(100)] for k in range(3)]
    requests = [engine.add(prompt, unbiased) for prompt in prompts]
    run, steps = engine.program.run, iter(range(10_000))

    def once(*arguments):
        if next(steps) == at:
            raise RuntimeError("once")
        return run(*arguments)

    monkeypatch.setattr(engine.program, "run", once)
    drive(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        if request.error is None:
            assert request.samples[0].output == alone(prompt, unbiased)
    assert sum(request.error is not None for request in requests) <= 1, "it was alone in the step that failed"


@pytest.mark.any_backend
def test_a_sampler_that_fails_ends_its_own_request() -> None:
    engine = engine_of()
    bad = engine.add(CLEAN[2], SHORT, constrain=lambda k: BrokenConstraint())
    good = engine.add(CLEAN[3], SHORT)
    finish(engine)
    assert str(bad.error) == "sampling"
    assert (bad.samples[0].finish_reason, good.samples[0].finish_reason) == ("error", "length")
    assert good.samples[0].output == alone(CLEAN[3], SHORT)


@pytest.mark.any_backend
def test_the_queue_is_bounded() -> None:
    engine = engine_of(max_seqs=2, max_waiting=3)
    for _ in range(5):  # two run at the next step, three wait
        engine.add(CLEAN[2], SHORT)
    with pytest.raises(QueueFull, match=r"the queue is full \(0 running, 5 waiting\)"):
        engine.add(CLEAN[2], SHORT)
    engine.step()
    with pytest.raises(QueueFull, match=r"the queue is full \(2 running, 3 waiting\)"):
        engine.add(CLEAN[2], SHORT)
    finish(engine)
    engine.add(CLEAN[2], SHORT)
    finish(engine)


@pytest.mark.any_backend
def test_beside_decodes_prompts_move_in_small_chunks() -> None:
    """A step has the decodes and at most 16 prompt tokens, which bounds the gap between two tokens."""
    engine = engine_of(max_batch_tokens=64, max_seqs=4, chunk_while_decoding=16)
    seen = []
    run = engine.program.run
    engine.program.run = lambda memory, step, *rest: seen.append(len(step.positions)) or run(memory, step, *rest)
    first = engine.add(CLEAN[1], SamplingParams(max_tokens=30))
    engine.step()
    long = engine.add(CLEAN[5], SHORT)
    gaps = []
    while engine.busy:
        events = engine.step()
        gaps += [event.gap for event in events if event.sample.request is first]
        assert first.done or any(event.sample.request is first for event in events), "a token in every step"
    assert max(seen) == 17, "one decode and a chunk of 16"
    assert long.samples[0].output == alone(CLEAN[5], SHORT)
    assert len(gaps) == 29
    assert all(gap is not None and gap > 0 for gap in gaps)


@pytest.mark.any_backend
def test_time_is_charged_to_the_request_that_spent_it() -> None:
    engine = engine_of(max_seqs=5, max_batch_tokens=32, block_size=16, cache_bytes=blocks_of_16(12))
    requests = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in CLEAN[2:5]]
    finish(engine)
    assert engine.scheduler.n_preemptions > 0
    found = [explain(request) for request in requests]
    spent = sum(each.prefill_ms + each.recomputed_ms for each in found)
    total = 1000 * (engine.stats.prefill_seconds + engine.stats.decode_seconds)
    assert 0 < spent < total
    computed = engine.stats.prefill_tokens + engine.stats.decode_tokens
    outputs = sum(len(request.samples[0].output) - 1 for request in requests)
    assert computed == sum(each.computed + each.recomputed_tokens for each in found) + outputs
    for each in found:
        assert 0 <= each.queued_ms <= each.first_token_ms <= each.total_ms
    assert np.isfinite(spent)


def test_a_step_that_is_lost_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program fails before it applies the step: copies and edits are gone, answers are not."""
    params = SamplingParams(max_tokens=12, temperature=1.3, seed=3, n=3)
    prompts = [list(range(20)), list(range(18)), list(range(40, 60))]
    expected = []
    for prompt in prompts:
        engine = tiny.engine_of(max_seqs=6, block_size=16)
        expected.append(engine.add(prompt, params))
        tiny.finish(engine)
    engine = tiny.engine_of(max_seqs=6, block_size=16)
    run, calls = engine.program.run, itertools.count()

    def failing(*args):
        if next(calls) in (2, 3, 9):
            raise RuntimeError("the launch failed")
        return run(*args)

    monkeypatch.setattr(engine.program, "run", failing)
    requests = [engine.add(prompt, params) for prompt in prompts]
    failed = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError as error:
            engine.isolate(error)
            failed += 1
        engine.cache.check()
    assert failed == 3
    good = [r for r in requests if r.error is None]
    assert len(good) >= 1, "a fault that comes back while a request is alone is taken for its own"
    for request, wanted in zip(requests, expected, strict=True):
        if request.error is None:
            assert [s.output for s in request.samples] == [s.output for s in wanted.samples]
    assert engine.cache.usage().sequences == engine.cache.usage().blocks_used == 0


def test_the_first_token_is_never_later_than_the_end() -> None:
    engine = engine_of()
    for n in (1, 1, 2):
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=n))
        finish(engine)
        timing = request.timing
        assert timing.queued_at <= timing.started_at <= timing.first_token_at <= timing.finished_at


def test_rows_without_a_token_are_never_sampled() -> None:
    """A padded vocabulary: the model prefers a row that the tokenizer has no token for."""
    program = program_of()
    engine = engine_of(program, n_tokens=60)
    free = engine_of(program)
    outputs = []
    for each in (engine, free):
        params = SamplingParams(max_tokens=40, temperature=1.5, seed=1, logprobs=5)
        request = each.add([1, 2, 3], params)
        finish(each)
        outputs.append(request.samples[0].output)
    assert max(outputs[0]) < 60 <= max(outputs[1])
    with pytest.raises(KvarnError, match="outside the vocabulary of 60"):
        engine.add([1, 60], SamplingParams())
