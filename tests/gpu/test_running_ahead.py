"""A decode step is launched before the tokens of the last one are read. Answers, and what the cache holds, are those
of an engine that reads every token first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gpu.support.models import Loaded, text, write
from support.tiny_models import GOLDEN

from kvarn.backends.cuda.program import CudaProgram
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request
from kvarn.errors import BadStep

ONE = replace(GOLDEN, n_layers=1, window=10)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=7, ignore_eos=True, temperature=1.2, top_p=0.9, seed=5)
Asked = tuple[list[int], SamplingParams]
ASKED: list[Asked] = [(text(3), GREEDY), (text(9, 1), replace(DRAWN, n=2)), (text(5, 2), DRAWN)]


@pytest.fixture
def loaded(cuda, tmp_path: Path) -> Loaded:
    return Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=64)


def drive(
    engine: Engine, asked: Sequence[Asked], between: Callable[[int, list[Request]], None] = lambda step, requests: None
) -> list[Request]:
    """Run requests together. `between` is called after each step."""
    requests = [engine.add(prompt, params, conversation=i) for i, (prompt, params) in enumerate(asked)]
    events: dict[tuple[int, int], list[int]] = {}
    steps = 0
    while engine.busy:
        for event in engine.step():
            events.setdefault((event.sample.request.id, event.sample.index), []).append(event.sampled.token)
        steps += 1
        between(steps, requests)
        assert steps < 1000, "the engine does not come to an end"
    engine.cache.check()
    for request in requests:
        for sample in request.samples:
            assert events.get((request.id, sample.index), []) == sample.output, "an event for each token, in order"
    return requests


def outputs(requests: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    return [(sample.output, sample.finish_reason) for request in requests for sample in request.samples]


def both(loaded: Loaded, **settings) -> tuple[Engine, Engine]:
    """One that runs ahead, and one that does not."""
    usual = {"max_seqs": 4, "block_size": 16} | settings
    return loaded.engine(64, 16, **usual), loaded.engine(64, 16, **usual, ahead=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_answers_are_the_same(loaded: Loaded, strategy: str) -> None:
    ahead, plain = both(loaded, strategy=strategy, pinned=0, block_size=None)
    assert outputs(drive(ahead, ASKED)) == outputs(drive(plain, ASKED))
    assert ahead.stats.steps_ahead >= 5
    assert plain.stats.steps_ahead == 0
    same = ("steps", "prompt_tokens", "generated_tokens", "decode_tokens", "prefill_tokens", "sampled", "finished")
    assert [getattr(ahead.stats, name) for name in same] == [getattr(plain.stats, name) for name in same]


def test_an_end_that_is_found_late_changes_nothing(loaded: Loaded) -> None:
    """Stop tokens in the middle of answers. The cache then has what it would have had: no token after the end."""
    ahead, plain = both(loaded)
    for request in drive(plain, ASKED):
        assert len(set(request.samples[0].output)) > 2
    known = outputs(drive(plain, ASKED))
    stops = [known[0][0][4], known[1][0][3], known[3][0][2]]
    asked = [(prompt, replace(params, stop_token_ids=stops)) for prompt, params in ASKED]
    ahead, plain = both(loaded)
    found, expected = drive(ahead, asked), drive(plain, asked)
    assert outputs(found) == outputs(expected)
    assert "stop" in {reason for _, reason in outputs(found)}
    assert ahead.stats.steps_ahead > 0
    for request, other in zip(found, expected, strict=True):
        longer = [*request.samples[0].tokens, 1, 2, 3]
        again, as_well = (drive(engine, [(longer, GREEDY)])[0] for engine in (ahead, plain))
        assert again.adoption == as_well.adoption, other.id
        assert outputs([again]) == outputs([as_well])


@pytest.mark.parametrize("strategy", ["paged", "contiguous", "sliding"])
def test_cancelled_and_finished_between_steps(loaded: Loaded, strategy: str) -> None:
    def between(engine: Engine) -> Callable[[int, list[Request]], None]:
        def act(step: int, requests: list[Request]) -> None:
            if step == 4:
                engine.cancel(requests[0])
            if step == 5 and requests[1].samples[0].finish_reason is None:
                engine.finish(requests[1].samples[0], "stop")

        return act

    ahead, plain = both(loaded, strategy=strategy, block_size=None)
    found, expected = (drive(engine, ASKED, between(engine)) for engine in (ahead, plain))
    assert outputs(found) == outputs(expected)
    assert ahead.cache.usage().tokens == plain.cache.usage().tokens, "parked sequences have the same tokens"
    parked = [r for placement in ahead.cache.placements for r in placement.sequences.values()]
    assert all(r.length == r.committed for r in parked), "and no token of the step that was dropped"
    follow = [([*request.samples[0].tokens, 7, 8], GREEDY) for request in found]
    again, as_well = (drive(engine, follow) for engine in (ahead, plain))
    assert outputs(again) == outputs(as_well)
    assert [request.adoption for request in again] == [request.adoption for request in as_well]


def test_requests_that_come_while_a_step_is_ahead(loaded: Loaded) -> None:
    late = [(text(20, 7), DRAWN), (text(2, 8), replace(GREEDY, max_tokens=3))]
    found = []
    for engine in both(loaded, max_seqs=3):
        added: list[Request] = []

        def act(step: int, requests: list[Request], engine: Engine = engine, added: list[Request] = added) -> None:
            if step in (4, 6):
                added.append(engine.add(*late[len(added)]))

        found.append(outputs([*drive(engine, ASKED, act), *added]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}, {"logprobs": 1}, {"logits_processors": [lambda o, s: s]}],
)
def test_rows_that_need_their_last_token_first(loaded: Loaded, settings: dict) -> None:
    """While such a request decodes, no step is ahead."""
    ahead, plain = both(loaded)
    asked = [(text(4), replace(GREEDY, max_tokens=5, **settings)), (text(3, 1), replace(GREEDY, max_tokens=5))]
    assert outputs(drive(ahead, asked)) == outputs(drive(plain, asked))
    assert ahead.stats.steps_ahead == 0


def test_a_bias_runs_ahead(loaded: Loaded) -> None:
    ahead, plain = both(loaded)
    asked = [(text(4), replace(DRAWN, logit_bias={5: 4.0, 9: -50.0}))]
    assert outputs(drive(ahead, asked)) == outputs(drive(plain, asked))
    assert ahead.stats.steps_ahead > 0


@pytest.mark.parametrize("max_tokens", [8, 1000])
def test_no_step_is_ahead_of_a_known_end(loaded: Loaded, max_tokens: int) -> None:
    """The end of the answer, or of the context. The first decode step is not ahead, because it follows a prompt."""
    engine = loaded.engine(32 if max_tokens == 8 else 12, 12, max_seqs=1)
    (request,) = drive(engine, [(text(4), replace(GREEDY, max_tokens=max_tokens))])
    assert len(request.samples[0].output) == 8
    assert request.samples[0].limit == ("max_tokens" if max_tokens == 8 else "context")
    assert engine.stats.steps == 8
    assert engine.stats.steps_ahead == 6


def test_little_room(loaded: Loaded) -> None:
    """Preemptions, and steps that find no room ahead."""
    block = loaded.cache(16, block_size=16)[1].plan.nbytes
    asked = [([*text(12), *text(3, i)], replace(DRAWN if i % 2 else GREEDY, max_tokens=14)) for i in range(4)]
    ahead, plain = (each for each in both(loaded, cache_bytes=6 * block))
    found, expected = drive(ahead, asked), drive(plain, asked)
    assert ahead.scheduler.n_preemptions > 0
    assert ahead.stats.steps_ahead > 0
    assert outputs(found) == outputs(expected)


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("call", ["run", "sample"])
def test_an_error_of_the_device(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, at: int, call: str) -> None:
    """All samples are computed again."""
    ahead, plain = both(loaded)
    calls = iter(range(1000))
    original = getattr(CudaProgram, call)

    def fails_once(*args):
        if next(calls) == at:
            raise ArithmeticError("once")
        return original(*args)

    expected = outputs(drive(plain, ASKED))
    step = ahead.step

    def guarded():
        try:
            return step()
        except ArithmeticError as error:
            ahead.isolate(error)
            return []

    monkeypatch.setattr(CudaProgram, call, fails_once)
    monkeypatch.setattr(ahead, "step", guarded)
    assert outputs(drive(ahead, ASKED)) == expected
    assert next(calls) > at


def test_a_restart_forgets_the_step_ahead(loaded: Loaded) -> None:
    """As benchmarks repeat a step."""
    found = []
    for engine in both(loaded):
        request = engine.add(text(4), GREEDY)
        for _ in range(4):
            engine.step()
        sample = request.samples[0]
        engine.restart(sample, text(6, 3), 0)
        while engine.busy:
            engine.step()
        engine.cache.check()
        found.append(sample.tokens)
    assert found[0] == found[1]


def test_two_engines_of_one_program(loaded: Loaded) -> None:
    """The tokens on the device are those of the other engine's step, so no step is ahead."""
    expected = outputs(drive(both(loaded)[1], ASKED))
    first, second = both(loaded)[0], both(loaded)[0]
    mine = [first.add(*asked) for asked in ASKED]
    assert outputs(drive(second, ASKED, lambda step, requests: bool(first.step()))) == expected
    while first.busy:
        first.step()
    assert outputs(mine) == expected


def test_a_token_that_was_not_sampled_is_refused(loaded: Loaded) -> None:
    memory, book = loaded.cache(16)
    book.open(0)
    for token in (-1, -2):
        book.reserve(0, 1)
        with pytest.raises(BadStep, match="or not sampled"):
            loaded.program.run(memory, book.prepare([0]), [token], [0])


@pytest.mark.requirement(32)
def test_a_decode_step_waits_once_for_ids_and_after_the_next_launch(loaded: Loaded, driver) -> None:
    """Waiting until the bytes of an earlier step were sent brings nothing back, and does not stop the device."""
    engine = loaded.engine(48, 16, max_seqs=3)
    for i in range(3):
        engine.add(text(3, i), replace(GREEDY, max_tokens=14, temperature=0.8 if i else 0.0, seed=i))
    for _ in range(4):
        engine.step()
    for _ in range(5):
        driver.calls.clear()
        assert len(engine.step()) == 3
        verbs = [call.verb for call in driver.calls]
        assert not {"download", "upload", "synchronize", "allocate"} & set(verbs)
        (wait,) = [at for at, call in enumerate(driver.calls) if call.verb == "wait" and call.args != (0,)]
        assert driver.calls[wait].args == (1,)
        assert "launch" not in verbs[wait:], "the next step is launched before the host waits"
        assert [call.args[1] for call in driver.calls if call.verb == "receive"] == [12]
        assert verbs.count("send") == 2, "the step, and the uniform numbers"
