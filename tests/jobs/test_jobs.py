"""One LLM shared by many callers: interleaved streams, threads, faults and interrupts change no other answer."""

import gc
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import tiny_model
from support.threads import together, until

from kvarn import LLM, KvarnError, SamplingParams
from kvarn.engine.engine import Event
from kvarn.jobs.job import Job, Listener
from kvarn.jobs.runner import Runner
from kvarn.jobs.turn import Turn

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, temperature=1.5, seed=3, n=2, logprobs=2, ignore_eos=True)
STOPPED = SamplingParams(max_tokens=30, temperature=1.5, seed=8, stop=("e", "zz"))
WORDS = ["ab", "cd", "night", "fox", "sea", "cat", "abcd", "x"]
PROMPTS = [f"{word} of number {i}, and what {word} was" for i, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, cache="paged", max_seqs=4, max_batch_tokens=32, block_size=16)


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[[str, SamplingParams], list[tuple]]:
    """What a prompt's completions are when it is the only one."""
    oracle = LLM(model, cache="contiguous", max_seqs=2)
    return lambda prompt, params=GREEDY: summary(oracle.generate(prompt, params)[0])


def summary(output: Any) -> list[tuple]:
    return [(c.text, c.tokens, c.finish_reason, c.logprobs) for c in output.completions]


def idle(llm: LLM) -> None:
    llm.cache.check()
    assert not llm.engine.busy
    assert llm.cache.usage().sequences == llm.cache.usage().blocks_used == 0


def test_two_streams_side_by_side(llm: LLM, alone: Callable) -> None:
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    pieces = [(next(first, ""), next(second, "")) for _ in range(40)]
    assert "".join(a for a, _ in pieces) == alone(PROMPTS[0])[0][0]
    assert "".join(b for _, b in pieces) == alone(PROMPTS[1])[0][0]
    idle(llm)


def test_generate_inside_a_stream(llm: LLM, alone: Callable) -> None:
    text = ""
    for i, piece in enumerate(llm.stream(PROMPTS[2], GREEDY)):
        text += piece
        if i < 3:
            assert summary(llm.generate(PROMPTS[3 + i], GREEDY)[0]) == alone(PROMPTS[3 + i])
    assert text == alone(PROMPTS[2])[0][0]
    idle(llm)


def test_threads_share_an_llm(llm: LLM, alone: Callable) -> None:
    """Eight threads, more than there are sequences: streams and batches, greedy, drawn and stopped."""

    def batches(k: int) -> Callable[[], Any]:
        params = (GREEDY, DRAWN, STOPPED)[k % 3]
        return lambda: [[summary(out) for out in llm.generate(PROMPTS[k : k + 3], params)] for _ in range(2)]

    def streams(k: int) -> Callable[[], Any]:
        return lambda: ["".join(llm.stream(prompt, STOPPED)) for prompt in PROMPTS[k : k + 4]]

    results = together(*(batches(k) if k % 2 else streams(k) for k in range(8)))
    for k, result in enumerate(results):
        if k % 2:
            params = (GREEDY, DRAWN, STOPPED)[k % 3]
            assert result == [[alone(prompt, params) for prompt in PROMPTS[k : k + 3]]] * 2
        else:
            assert result == [alone(prompt, STOPPED)[0][0] for prompt in PROMPTS[k : k + 4]]
    idle(llm)


# -- faults ----------------------------------------------------------------------------------------------------------

POISON = 33  # "!"
CLEAN = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={POISON: -100.0})


def poisoned(llm: LLM, before: Callable[[Any], None] = lambda tokens: None) -> None:
    """A program that fails on one token. `before` sees the tokens of every step."""
    run = llm.program.run

    def fail(memory, step, tokens, wanted):
        before(tokens)
        if POISON in tokens:
            raise RuntimeError("a kernel failed")
        return run(memory, step, tokens, wanted)

    llm.engine.program.run = fail


def test_a_fault_ends_one_request_in_threads(llm: LLM, alone: Callable, caplog: pytest.LogCaptureFixture) -> None:
    poisoned(llm)
    prompts = [*PROMPTS[:3], "a bad one!", *PROMPTS[3:6]]
    results = together(*(lambda prompt=prompt: summary(llm.generate(prompt, CLEAN)[0]) for prompt in prompts))
    bad = results.pop(3)
    assert isinstance(bad, RuntimeError)
    assert str(bad) == "a kernel failed"
    assert results == [alone(prompt, CLEAN) for prompt in PROMPTS[:6]]
    assert "a step failed: RuntimeError: a kernel failed" in caplog.text
    idle(llm)


def test_a_fault_ends_one_request_beside_a_stream(llm: LLM, alone: Callable) -> None:
    poisoned(llm)
    stream = llm.stream(PROMPTS[0], CLEAN)
    text = next(stream)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        llm.generate([PROMPTS[1], "a bad one!", PROMPTS[2]], CLEAN)
    broken = llm.stream("bad!", CLEAN)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        list(broken)
    assert text + "".join(stream) == alone(PROMPTS[0], CLEAN)[0][0]
    idle(llm)


def test_text_that_cannot_be_written_fails_alone(llm: LLM, alone: Callable) -> None:
    good, bad = (llm.start(prompt, GREEDY) for prompt in PROMPTS[:2])

    def broken(token: int) -> bool:
        raise UnicodeError("no such letter")

    bad.texts[0].push = broken
    with pytest.raises(UnicodeError, match="no such letter"):
        llm.runner.wait(bad)
    llm.runner.wait(good)
    assert summary(good.output()) == alone(PROMPTS[0])
    idle(llm)


def test_a_prompt_that_cannot_be_scheduled_fails_alone(llm: LLM, alone: Callable) -> None:
    """The fault comes before there is a step, while room is found for the prompt."""
    adopt = llm.cache.adopt

    def fail(seq, tokens, *rest):
        if POISON in tokens:
            raise RuntimeError("no such prefix")
        return adopt(seq, tokens, *rest)

    llm.cache.adopt = fail
    results = together(*(lambda p=p: summary(llm.generate(p, CLEAN)[0]) for p in (PROMPTS[0], "bad!", PROMPTS[1])))
    assert str(results[1]) == "no such prefix"
    assert [results[0], results[2]] == [alone(prompt, CLEAN) for prompt in PROMPTS[:2]]
    idle(llm)


def test_a_fault_of_no_request_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list:
        raise RuntimeError("the scheduler is broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", broken)
        with pytest.raises(RuntimeError, match="the scheduler is broken"):
            llm.generate(PROMPTS[:2])
    idle(llm)


def test_a_prompt_of_fractions_is_refused(llm: LLM) -> None:
    for _ in range(6):
        with pytest.raises(KvarnError, match="a token that is not an integer"):
            llm.generate([[1.5, 2.5, 3]])
    idle(llm)


# -- which thread steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_thread_hands_the_turn_over(llm: LLM, alone: Callable, interrupt: type[BaseException]) -> None:
    """One thread steps for two that sleep; it is interrupted in the middle of a step, and one of them takes over."""
    turn = Turn()
    llm.runner = Runner(llm.engine, llm.tokenizer, turn)
    jobs = [llm.start(prompt, GREEDY) for prompt in PROMPTS[:4]]  # no thread waits for the last one
    run, steps = llm.program.run, iter(range(10_000))

    def interrupted(*arguments):
        if next(steps) == 3:
            until(lambda: turn.n_waiting == 2)
            raise interrupt
        return run(*arguments)

    llm.engine.program.run = interrupted
    results = together(*(lambda job=job: llm.runner.wait(job) for job in jobs[:3]))
    assert sorted(map(type, results), key=str) == sorted([interrupt, type(None), type(None)], key=str)
    for prompt, job in zip(PROMPTS, jobs, strict=False):
        llm.runner.wait(job)
        assert summary(job.output()) == alone(prompt)
    idle(llm)


def test_cancelling_from_another_thread(llm: LLM, alone: Callable) -> None:
    """In the middle of a step: the canceller does not wait, and the blocks are free before the next step."""
    entered, cancelled = threading.Event(), threading.Event()
    run = llm.program.run

    def slow(*arguments):
        if job.request.samples[0].n_output == 5:
            entered.set()
            assert cancelled.wait(60)
        return run(*arguments)

    job, other = llm.start(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)), llm.start(PROMPTS[1], GREEDY)
    llm.engine.program.run = slow

    def cancel() -> None:
        assert entered.wait(60)
        llm.runner.cancel(job)
        cancelled.set()

    waits = together(lambda: llm.runner.wait(job), cancel, lambda: llm.runner.wait(other))
    assert waits == [None] * 3
    assert (len(job.output().tokens), job.output().finish_reason) == (6, "cancelled"), (
        "the step under way, and no other"
    )
    assert summary(other.output()) == alone(PROMPTS[1])
    idle(llm)


class Nosy(Listener):
    """Calls back into the runner from inside a step."""

    def __init__(self, act: Callable[[Job], object]) -> None:
        self.act = act
        self.n_ended = 0

    def token(self, job: Job, event: Event) -> None:
        self.act(job)

    def ended(self, job: Job) -> None:
        self.n_ended += 1


def test_a_listener_may_cancel_and_nothing_else(llm: LLM, alone: Callable) -> None:
    ids, runner = llm.tokenizer.encode(PROMPTS[0]), llm.runner
    beside = llm.start(PROMPTS[1], GREEDY)
    for act in (lambda job: llm.generate("x"), runner.wait, lambda job: runner.step(), lambda job: runner.forget("c")):
        job = runner.add(ids, GREEDY, listener=Nosy(act))
        with pytest.raises(KvarnError, match="in the middle of a step"):
            runner.wait(job)
        assert job.listener.n_ended == 1
    job = runner.add(ids, GREEDY, listener=Nosy(runner.cancel))
    runner.wait(job)
    assert (len(job.output().tokens), job.output().finish_reason) == (1, "cancelled")
    runner.wait(beside)
    assert summary(beside.output()) == alone(PROMPTS[1])
    idle(llm)


def test_a_stream_that_is_collected_inside_a_step(llm: LLM, alone: Callable) -> None:
    """A finalizer runs anywhere, also on the thread that steps: what it drops is free after the step."""
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    run, steps = llm.program.run, itertools.count()
    llm.engine.program.run = lambda *arguments: (next(steps) == 1 and gc.collect(), run(*arguments))[1]
    assert summary(llm.generate(PROMPTS[1], GREEDY)[0]) == alone(PROMPTS[1])
    idle(llm)


def test_the_template_is_compiled_once(llm: LLM) -> None:
    assert llm.template is llm.template
    assert (
        llm.chat([{"role": "user", "content": "ab"}], GREEDY, temperature=0).text
        == llm.generate("<user>ab\n<assistant>", GREEDY)[0].text
    )


NOT_PROMPTS = {
    "floats": [1.7, 2.2],
    "a batch with floats": [[1.5, 2.5, 3]],
    "NumPy floats": [np.array([1.0, 2.0], np.float32)],
    "bytes": b"abc",
    "a batch of bytes": [b"abc"],
    "a number": 5,
    "nothing": None,
    "ids and texts": [1, "a"],
}


@pytest.mark.parametrize("prompts", NOT_PROMPTS.values(), ids=NOT_PROMPTS)
def test_what_is_no_prompt_is_refused_before_anything_is_opened(llm: LLM, prompts: Any) -> None:
    for _ in range(3):  # more than max_seqs would hold
        with pytest.raises(KvarnError, match="give text"):
            llm.generate(prompts, GREEDY)
    idle(llm)


def test_ids_of_any_integer_type_are_a_prompt(llm: LLM) -> None:
    expected = summary(llm.generate([1, 2, 3], GREEDY)[0])
    for prompt in (np.array([1, 2, 3]), (1, 2, 3), [np.int32(1), 2, True + 2], [np.array([1, 2, 3])], [[1, 2, 3]]):
        assert summary(llm.generate(prompt, GREEDY)[0]) == expected


def test_settings_by_name_and_params_for_each_prompt(llm: LLM) -> None:
    ids = [[1, 2, 3], [4, 5], [6]]
    whole = [summary(output) for output in llm.generate(ids, GREEDY)]
    assert [summary(output) for output in llm.generate(ids, max_tokens=24, ignore_eos=True)] == whole
    short = replace(GREEDY, max_tokens=2)
    mixed = llm.generate(ids, [GREEDY, short, DRAWN])
    assert [summary(output) for output in mixed] == [
        whole[0],
        summary(llm.generate(ids[1], short)[0]),
        summary(llm.generate(ids[2], DRAWN)[0]),
    ]
    assert [len(output.tokens) for output in llm.generate(ids, [GREEDY] * 3, max_tokens=3)] == [3, 3, 3]
    assert "".join(llm.stream("ab", GREEDY, max_tokens=4)) == llm.generate("ab", max_tokens=4, ignore_eos=True)[0].text
    assert llm.chat([{"role": "user", "content": "ab"}], max_tokens=2, ignore_eos=True).finish_reason == "length"
    idle(llm)


def test_wrong_settings_are_refused_by_name(llm: LLM) -> None:
    for call, message in (
        (lambda: llm.generate("ab", max_token=3), "there is no setting 'max_token': did you mean max_tokens?"),
        (lambda: llm.generate("ab", zzz=3), "there is no setting 'zzz'"),
        (lambda: llm.generate(["ab", "cd"], [GREEDY]), "2 prompts and 1 params: give one for all, or one for each"),
        (lambda: llm.generate("ab", {"max_tokens": 3}), "params is dict: give SamplingParams, or settings by name"),
        (lambda: list(llm.stream("ab", max_tokens=0)), "max_tokens is 0; it must be at least 1"),
    ):
        with pytest.raises(KvarnError, match=re.escape(message)):
            call()
    idle(llm)


def test_a_model_describes_itself(llm: LLM, model: Path) -> None:
    assert repr(llm) == f"LLM({str(model)!r}, backend='cpu', cache='paged bf16, 4 x 512 tokens')"
