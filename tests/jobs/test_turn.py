"""One thread at a time has the engine; Ctrl-C waits for the end of a step."""

import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from support.serving import tiny_model
from support.threads import together, until

import kvarn
from kvarn import LLM, SamplingParams
from kvarn.jobs.runner import Runner
from kvarn.jobs.turn import Turn, Uninterrupted

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Counting:
    """An engine that only counts its steps, and notices when two threads are in it at once."""

    def __init__(self) -> None:
        self.n = 0
        self.stats = SimpleNamespace(finished=0)
        self._inside = threading.Lock()

    def step(self) -> list:
        with self:
            self.n += 1
        return []

    def isolate(self, error: BaseException) -> None:
        assert isinstance(error, ZeroDivisionError)

    def __enter__(self) -> None:
        assert self._inside.acquire(blocking=False), "two at once"

    def __exit__(self, *error: object) -> None:
        self._inside.release()


def test_one_thread_at_a_time_and_every_wait_ends() -> None:
    """Waits, calls and steps of eight threads, in any order: each comes to its end."""
    engine, turn, n_calls = Counting(), Turn(), []
    runner = Runner(engine, None, turn)  # type: ignore[arg-type]

    def play(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            kind, goal = rng.randrange(3), engine.n + rng.randrange(5)
            if kind == 0:
                runner.advance(lambda goal=goal: engine.n >= goal)
                assert engine.n >= goal
            elif kind == 1:
                with_turn = runner.call(lambda: engine.__enter__() or n_calls.append(1) or engine.__exit__() or seed)
                assert with_turn == seed
            else:
                runner.step()

    assert together(*(lambda seed=seed: play(seed) for seed in range(8))) == [None] * 8
    assert turn.n_waiting == 0
    assert turn.take_now(), "no thread has kept it"


def test_a_call_does_not_starve_behind_the_thread_that_steps() -> None:
    engine, over = Counting(), threading.Event()
    runner = Runner(engine, None)  # type: ignore[arg-type]

    def call() -> None:
        until(lambda: engine.n)
        for _ in range(20):
            before = runner.call(lambda: engine.n)
            until(lambda before=before: runner.call(lambda: engine.n) > before)  # and steps go on between calls
        over.set()

    assert together(lambda: runner.advance(over.is_set), call) == [None, None]


def test_an_error_in_a_call_is_raised_to_its_caller() -> None:
    runner = Runner(Counting(), None)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        runner.call(lambda: 1 // 0)
    assert runner.call(lambda: 5) == 5


def test_a_thread_that_left_the_queue_is_not_given_the_turn() -> None:
    """A wait that raises removes its thread from the queue."""
    turn = Turn()
    turn.take()

    def wait() -> None:
        turn.take(lambda: 1 // 0 > 0)

    (error,) = together(wait)
    assert isinstance(error, ZeroDivisionError)
    turn.give()
    assert together(turn.take_now) == [True]


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def interrupted(llm: LLM, at: int, times: int = 1) -> None:
    """The signal comes in the middle of a step."""
    run, steps = llm.program.run, iter(range(10_000))

    def noisy(*arguments):
        if next(steps) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return run(*arguments)

    llm.engine.program.run = noisy


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_ctrl_c_leaves_nothing_behind(model: Path, at: int, times: int) -> None:
    """Other jobs lose no token. A second Ctrl-C does not wait for the end of the step."""
    llm = LLM(model, cache="paged", max_seqs=2)
    expected = llm.generate("something else", LONG)[0]
    beside = llm.start("something else", LONG)
    interrupted(llm, at, times)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("something", LONG)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.runner.wait(beside)
    assert beside.output().tokens == expected.tokens
    assert beside.output().text == expected.text
    llm.cache.check()
    assert llm.cache.usage().sequences == 0


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_ctrl_c_at_many_lines(model: Path, cache: str) -> None:
    """Before every third line that `generate` runs: nothing is held afterwards, and the next answer is right."""
    llm = LLM(model, cache=cache, max_seqs=2, max_batch_tokens=16)
    files = {
        str(Path(kvarn.__file__).parent / name)
        for name in ("llm.py", "jobs/runner.py", "jobs/turn.py", "engine/engine.py")
    }
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = [output.tokens for output in llm.generate(["abc", "cd"], params)]

    def interrupt_at(place: int) -> bool:
        """False when it has fewer lines."""
        lines = itertools.count()

        def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
            if frame.f_code.co_filename not in files:
                return None
            if event == "line" and next(lines) == place:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            llm.generate(["abc", "cd"], params)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    n = 0
    while interrupt_at(n):
        assert not llm.engine.busy, n
        assert llm.cache.usage().sequences == 0, n
        assert [output.tokens for output in llm.generate(["abc", "cd"], params)] == expected, n
        n += 3
    assert n > 400


def test_a_conversation_continues_after_ctrl_c(model: Path) -> None:
    """As in `kvarn chat --cache ring`: the next turn goes on in what this one has computed."""
    llm = LLM(model, cache="ring", max_seqs=1)
    interrupted(llm, 5)
    prompt = llm.tokenizer.encode("a long question, to begin with")
    job = llm.start(prompt, LONG, conversation="c")
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream_job(job))
    assert len(job.output().tokens) == 6, "the step under way came to its end"
    again = llm.start([*prompt, *job.output().tokens, 1, 2, 3], LONG, conversation="c")
    "".join(llm.stream_job(again))
    assert again.output().cached_tokens == len(prompt) + 5
    llm.runner.forget("c")
    assert llm.cache.usage().sequences == 0


def test_a_signal_handler_of_the_program_is_not_replaced() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    together(lambda: Uninterrupted().__enter__())  # Python interrupts the main thread only
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
