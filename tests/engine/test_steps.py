"""What one step of the engine computes."""

import pytest
from support import tiny
from support.null_backend import TOKEN

from kvarn.engine.config import EngineConfig
from kvarn.engine.params import SamplingParams
from kvarn.engine.scheduler import Scheduler
from kvarn.errors import KvarnError


@pytest.mark.parametrize("name", ["max_batch_tokens", "chunk_while_decoding", "max_waiting"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(KvarnError, match=f"{name} is 0; it must be a whole number, at least 1"):
        EngineConfig(**{name: 0})


def ask_for_every_row(scheduler: Scheduler) -> None:
    schedule = scheduler.schedule
    scheduler.schedule = lambda: [work._replace(n_rows=work.n) for work in schedule()]  # type: ignore[method-assign]


def test_logits_of_every_row_of_a_chunk_may_be_computed() -> None:
    """Logits of every row of every chunk: the newest row is sampled, as if it were alone."""
    prompts, params = [[5, 6, 7, 8, 9], [1], list(range(30, 60))], SamplingParams(max_tokens=8, n=2, seed=1)
    answers = []
    for every_row in (False, True):
        engine = tiny.engine_of(max_batch_tokens=16, max_seqs=6)
        if every_row:
            ask_for_every_row(engine.scheduler)
        requests = [engine.add(prompt, params) for prompt in prompts]
        tiny.finish(engine)
        answers.append([[sample.output for sample in request.samples] for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.any_backend
def test_prompt_tokens_count_as_prefill_and_sampled_tokens_as_decode(computing: bool) -> None:
    """A prompt of one token is a prefill; only sampled tokens are decoded."""
    engine = tiny.engine_of(max_batch_tokens=4)
    engine.add([1], SamplingParams(max_tokens=3))
    engine.add([2, 3, 4, 5, 6], SamplingParams(max_tokens=1))
    tiny.finish(engine)
    stats = engine.stats
    assert stats.prefill_tokens + stats.decode_tokens == 1 + 2 + 5
    assert stats.decode_tokens in (1, 2)
    if not computing:
        steps = engine.memory.steps
        assert [sum(step.n_new) for step in steps][:2] == [4, 3]
        assert TOKEN not in (1, 2)
