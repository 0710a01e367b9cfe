"""Log-probabilities of prompts: the numbers, and that nothing else changes when they are asked for."""

from pathlib import Path
from typing import Any

import pytest
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.engine import drawing
from kvarn.engine.drawing import Drawing
from kvarn.engine.explain import explain, in_words
from kvarn.engine.sampling import log_softmax
from kvarn.engine.scheduler import MOST_ROWS, MOST_ROWS_WHILE_DECODING, Scheduler, Work
from kvarn.engine.scoring import score
from kvarn.errors import BadLogits
from kvarn.jobs.job import TokenLogprob

PROMPTS = ["ab of the night", "cd and a fox", "the sea"]
DRAWN = SamplingParams(max_tokens=20, temperature=1.5, seed=3, n=2, ignore_eos=True)
LONG = "the sea and the night and a fox " * 8  # 248 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, cache="paged", max_seqs=4, max_batch_tokens=32, block_size=16, context=320)


def idle(llm: LLM) -> None:
    llm.cache.check()
    assert not llm.engine.busy
    assert llm.cache.usage().sequences == 0


def test_prompt_logprobs_are_those_of_the_scored_text(llm: LLM) -> None:
    """More rows than a step may have, with a prefix that the cache already holds."""
    before = llm.generate(LONG, max_tokens=4)[0]
    (output,) = llm.generate(LONG, max_tokens=4, prompt_logprobs=3, logprobs=3)
    assert (output.cached_tokens, output.tokens) == (0, before.tokens)
    tokens = output.prompt_token_ids
    assert len(tokens) > 2 * MOST_ROWS
    logits = score(llm.program, llm.memory, llm.cache, tokens, 0, 32)
    found = output.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(tokens)
    for at, each in enumerate(found[1:], 1):
        row = log_softmax(logits[at - 1])
        top = sorted(range(len(row)), key=lambda t: (-row[t], t))[:3]
        assert each == TokenLogprob(tokens[at], float(row[tokens[at]]), tuple((t, float(row[t])) for t in top))


def test_prompt_logprobs_do_not_depend_on_chunks_batch_or_preemption(model: Path) -> None:
    params = SamplingParams(max_tokens=40, prompt_logprobs=1, ignore_eos=True, n=2, temperature=1, seed=1)
    roomy = LLM(model, context=320, max_seqs=2)
    prompts = [LONG[:150], LONG[40:200], LONG[:170]]
    want = [roomy.generate(prompt, params)[0] for prompt in prompts]
    each = roomy.cache.plan.bytes_per_token * 16
    for chunk in (5, 512):
        tight = LLM(
            model, cache="paged", context=320, max_seqs=4, block_size=16, cache_bytes=20 * each, max_batch_tokens=chunk
        )
        found = tight.generate(prompts, params)
        assert [output.prompt_logprobs for output in found] == [output.prompt_logprobs for output in want]
        assert [output.completions for output in found] == [output.completions for output in want]
        assert tight.engine.scheduler.n_preemptions > 0
        idle(tight)


def test_a_step_has_few_rows_of_prompts_whatever_asks_for_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients can ask for log-probabilities of long prompts; the others must not wait long."""
    steps: list[tuple[int, bool]] = []
    choose = Scheduler.schedule

    def schedule(self: Scheduler) -> list[Work]:
        work = choose(self)
        rows = sum(each.n_rows for each in work if each.n > 1 and not each.decodes)
        steps.append((rows, any(each.decodes for each in work)))
        return work

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    wide = LLM(llm.name, cache="paged", max_seqs=8, context=320)
    outputs = wide.generate([LONG[:200]] * 6 + ["ab"], [SamplingParams(prompt_logprobs=0)] * 6 + [SamplingParams()])
    assert len({tuple(output.prompt_logprobs or ()) for output in outputs[:6]}) == 1
    assert max(rows for rows, decodes in steps) == MOST_ROWS
    assert max(rows for rows, decodes in steps if decodes) == MOST_ROWS_WHILE_DECODING


def test_damaged_weights_fail_the_request_that_asks_for_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(*args: Any) -> int:
        raise BadLogits("the model's largest logit is nan")

    monkeypatch.setattr(drawing, "likeliest_token", report)
    other = llm.start("ab", SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(BadLogits):
        llm.generate(LONG, prompt_logprobs=0)
    llm.runner.wait(other)
    assert len(other.output().tokens) == 4
    idle(llm)


@pytest.mark.parametrize("cache", ["contiguous", "paged", "sinks"])
def test_a_conversation_with_prompt_logprobs(model: Path, cache: str) -> None:
    llm = LLM(model, cache=cache, context=128, max_seqs=1)
    ask = SamplingParams(max_tokens=3, prompt_logprobs=0, temperature=0)
    for turn in ("ab and cd", "ab and cd, then a fox"):
        job = llm.start(turn, ask, conversation="one")
        llm.runner.wait(job)
        output = job.output()
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == output.prompt_tokens
        assert "log-probabilities of the prompt were asked for" in in_words(explain(job.request), str)
    one = llm.generate([97], max_tokens=1, prompt_logprobs=0)[0]
    assert one.prompt_logprobs == [None]


def test_an_error_in_a_step_with_prompt_rows_leaves_each_row_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate(LONG, max_tokens=2, prompt_logprobs=0)[0].prompt_logprobs
    steps = iter(range(1000))

    def take(self: Drawing, *args: Any) -> Any:
        if next(steps) in (0, 3):
            raise ArithmeticError("once")
        return original(self, *args)

    original = Drawing.tokens
    monkeypatch.setattr(Drawing, "tokens", take)
    others = [llm.start(prompt, DRAWN) for prompt in PROMPTS]  # so that no single request is blamed
    assert llm.generate(LONG, max_tokens=2, prompt_logprobs=0)[0].prompt_logprobs == want
    for job in others:
        llm.runner.cancel(job)
    idle(llm)
