"""The Python API: what callers may give, what they get, and docs/python.md."""

import asyncio
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_gguf
from support.serving import tiny_model
from support.tiny_files import write_hf

from kvarn import LLM, AsyncLLM, KvarnError, SamplingParams
from kvarn.engine import engine
from kvarn.engine.engine import Engine
from kvarn.engine.explain import explain, in_words
from kvarn.engine.params import chat_defaults
from kvarn.engine.sampling import log_softmax
from kvarn.engine.scheduler import MOST_ROWS, MOST_ROWS_WHILE_DECODING, Scheduler, Work
from kvarn.engine.scoring import score
from kvarn.errors import BadLogits
from kvarn.jobs.job import Completion, Output, TokenLogprob
from kvarn.jobs.pieces import Piece
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.own_sampling import own_sampling

ROOT = Path(__file__).parents[1]
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


# -- chats and streams ---------------------------------------------------------------------------------------------


def test_a_conversation_is_a_text_or_messages_or_several(llm: LLM) -> None:
    greedy: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    one = llm.chat([{"role": "user", "content": "ab"}], **greedy)
    assert one.tokens == llm.generate("<user>ab\n<assistant>", **greedy)[0].tokens
    assert llm.chat("ab", **greedy).tokens == one.tokens
    several = llm.chat(["ab", [{"role": "user", "content": "cd"}]], **greedy)
    assert [each.tokens for each in several] == [one.tokens, llm.chat("cd", **greedy).tokens]
    each = llm.chat(["ab", "ab"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)], ignore_eos=True)
    assert [len(output.tokens) for output in each] == [2, 3]
    idle(llm)


NOT_CONVERSATIONS = {
    "a number": 5,
    "nothing": None,
    "bytes": b"ab",
    "a message": {"role": "user"},
    "no message": [],
    "a text and a number": ["ab", 5],
    "a list in a list": [["ab"]],
    "no role": [{"content": "x"}],
    "no content": [{"role": "user"}],
    "content of nothing": [{"role": "user", "content": None}],
    "an image": [{"role": "user", "content": [{"type": "image_url"}]}],
}


@pytest.mark.parametrize("wrong", NOT_CONVERSATIONS.values(), ids=NOT_CONVERSATIONS)
def test_what_is_no_conversation_is_refused(llm: LLM, wrong: object) -> None:
    with pytest.raises(KvarnError, match=r"conversation|message"):
        llm.chat(wrong)  # type: ignore[call-overload]
    idle(llm)


def test_text_parts_are_joined(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]}]
    assert llm.render(parts) == llm.render("ab\ncd")


@pytest.mark.parametrize("wrong", [{"prompt": "ab"}, {1, 2}, [True, False], 5, b"ab", [b"ab"]], ids=str)
def test_what_is_no_prompt_is_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(KvarnError, match="give text"):
        llm.generate(wrong)
    idle(llm)


def test_several_prompts_in_any_form(llm: LLM) -> None:
    assert llm.generate([]) == []
    texts = [output.text for output in llm.generate(["ab", "cd"], max_tokens=3)]
    assert [output.text for output in llm.generate((text for text in ("ab", "cd")), max_tokens=3)] == texts
    assert llm.generate(np.array([97, 98]), max_tokens=3)[0].tokens == llm.generate([97, 98], max_tokens=3)[0].tokens
    with pytest.raises(KvarnError, match="prompt 1 of 2, counted from 0: the prompt is empty"):
        llm.generate(["ab", []])
    with pytest.raises(KvarnError, match="use stream_batch"):
        llm.stream(["ab", "cd"])  # type: ignore[arg-type]


def test_streams_give_the_answers_of_generate(llm: LLM) -> None:
    want = llm.generate(PROMPTS, DRAWN)
    stream = llm.stream_batch(PROMPTS, DRAWN)
    texts = {(prompt, sample): "" for prompt in range(3) for sample in range(2)}
    for piece in stream:
        assert piece.text
        texts[piece.prompt, piece.sample] += piece.text
    assert texts == {(i, k): c.text for i, output in enumerate(want) for k, c in enumerate(output.completions)}
    assert [output.completions for output in stream.outputs] == [output.completions for output in want]
    one = llm.stream_chat("ab", max_tokens=9, temperature=0)
    assert "".join(one) == one.output.text == llm.chat("ab", max_tokens=9, temperature=0).text
    idle(llm)


def test_a_stream_that_is_left_dropped_or_closed_frees_what_it_held(llm: LLM) -> None:
    for _ in llm.stream_batch(PROMPTS, DRAWN):
        break
    idle(llm)
    llm.stream("ab")  # starts at once
    idle(llm)
    with llm.stream("ab", ignore_eos=True) as stream:
        next(stream)
        assert llm.engine.busy
        assert stream.output.finish_reason is None, "it is being computed"
    idle(llm)
    assert stream.output.finish_reason == "cancelled"
    assert list(stream) == [], "a closed stream has no more pieces"
    with pytest.raises(KvarnError, match="n is 2: use stream_batch"):
        llm.stream("ab", n=2)


def test_an_error_comes_after_the_text_before_it(llm: LLM) -> None:
    def fails(tokens: list[int], logits: np.ndarray) -> None:
        if len(tokens) == 3:
            raise ArithmeticError("the fourth token")

    stream = llm.stream_batch(PROMPTS, [SamplingParams(logits_processors=fails), DRAWN, DRAWN], ignore_eos=True)
    pieces: list[Piece] = []
    with pytest.raises(ArithmeticError, match="the fourth token"):
        pieces.extend(stream)
    failed = stream.outputs[0]
    assert len(failed.tokens) == 3
    assert "".join(piece.text for piece in pieces if piece.prompt == 0) == failed.text
    idle(llm)


def test_async_streams_and_chats(llm: LLM) -> None:
    async def main() -> None:
        model = AsyncLLM(llm)
        want = await model.generate(PROMPTS, DRAWN)
        stream = model.stream_batch(PROMPTS, DRAWN)
        text = {(i, k): "" for i in range(3) for k in range(2)}
        async for piece in stream:
            text[piece.prompt, piece.sample] += piece.text
        assert text == {(i, k): c.text for i, output in enumerate(want) for k, c in enumerate(output.completions)}
        assert [output.completions for output in stream.outputs] == [output.completions for output in want]
        one = model.stream_chat("ab", max_tokens=9, temperature=0)
        assert "".join([piece async for piece in one]) == one.output.text == llm.chat("ab", max_tokens=9, top_k=1).text
        both = await model.chat(["ab", "cd"], max_tokens=3)
        assert len(both) == 2
        assert repr(model).startswith(f"AsyncLLM({llm.name!r}")
        model.close()

    asyncio.run(main())


def test_an_async_stream_that_is_closed_while_it_starts(llm: LLM) -> None:
    async def main() -> None:
        model = AsyncLLM(llm)
        stream = model.stream_batch(PROMPTS, DRAWN)
        reading = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)  # it has begun to start its requests
        with pytest.raises(KvarnError, match="being read by another task"):
            await anext(stream)
        await stream.aclose()
        assert await reading is None
        while llm.runner.busy:
            await asyncio.sleep(0.001)
        idle(llm)
        with pytest.raises(KvarnError, match="the model is loaded already: context"):
            AsyncLLM(llm, context=64)

    asyncio.run(main())


def test_an_llm_outlives_the_async_llm_that_was_given_it(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as model:
            unfinished = asyncio.create_task(model.generate("ab", max_tokens=300, ignore_eos=True))
            while not llm.engine.busy:
                await asyncio.sleep(0.001)
        with pytest.raises(KvarnError, match="this AsyncLLM is closed"):
            await unfinished
        with pytest.raises(KvarnError, match="this AsyncLLM is closed"):
            await model.generate("ab")

    asyncio.run(main())
    assert len(llm.generate("ab", max_tokens=2)[0].tokens) == 2


def test_an_output_holds_its_prompt(llm: LLM) -> None:
    (text,), (ids,) = llm.generate("ab", max_tokens=1), llm.generate([97, 98], max_tokens=1)
    assert (text.prompt, text.prompt_tokens) == ("ab", len(text.prompt_token_ids))
    assert (ids.prompt, ids.prompt_token_ids) == (None, [97, 98])
    assert llm.chat("ab", max_tokens=1).prompt is None


# -- logits processors ---------------------------------------------------------------------------------------------


def test_a_logits_processor_sees_the_tokens_of_its_sample(llm: LLM) -> None:
    seen: list[list[int]] = []

    def next_letter(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        assert logits.dtype == np.float64
        wanted = np.full_like(logits, -np.inf)
        wanted[97 + len(tokens)] = 0
        return wanted

    (output,) = llm.generate("ab", max_tokens=5, n=2, temperature=1, logits_processors=[next_letter])
    assert [completion.tokens for completion in output.completions] == [[97, 98, 99, 100, 101]] * 2
    assert seen.count([97, 98]) == 2


def test_a_processor_changes_no_answer_of_others_and_survives_preemption(model: Path) -> None:
    def odd(tokens: list[int], logits: np.ndarray) -> None:
        logits[::2] = -np.inf

    settings: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.5, "seed": 4}
    roomy = LLM(model, max_seqs=1, context=128)
    want = [roomy.generate(PROMPTS[0], logits_processors=odd, **settings)[0].tokens]
    want += [roomy.generate(prompt, **settings)[0].tokens for prompt in PROMPTS[1:]]
    each = roomy.cache.plan.bytes_per_token * 16
    tight = LLM(model, cache="paged", max_seqs=3, context=128, block_size=16, cache_bytes=9 * each)
    both = tight.generate(PROMPTS, [SamplingParams(logits_processors=odd), *[SamplingParams()] * 2], **settings)
    assert [output.tokens for output in both] == want
    assert tight.engine.scheduler.n_preemptions > 0
    assert all(token % 2 for token in want[0])


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (lambda tokens, logits: logits[:3], r"returned \(3,\), not"),
        (lambda tokens, logits: logits - np.inf, "no token is allowed"),
        (lambda tokens, logits: logits * np.nan, "the largest logit is nan"),
    ],
)
def test_what_a_processor_returns_is_checked(llm: LLM, process: Any, message: str) -> None:
    with pytest.raises(KvarnError, match=message):
        llm.generate("ab", logits_processors=[process])
    idle(llm)
    with pytest.raises(KvarnError, match="the logits processor <lambda> called exit"):
        llm.generate("ab", logits_processors=[lambda tokens, logits: sys.exit(3)])
    with pytest.raises(KvarnError, match="may not call it"):
        llm.generate("ab", logits_processors=[lambda tokens, logits: llm.generate("cd")])  # type: ignore[list-item]
    idle(llm)
    with pytest.raises(KvarnError, match=r"logits_processors is .*; it must be a list of functions"):
        SamplingParams(logits_processors=[5])  # type: ignore[list-item]


# -- log-probabilities of prompts ------------------------------------------------------------------------------------


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

    monkeypatch.setattr(engine, "likeliest_token", report)
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

    def take(self: Engine, *args: Any) -> Any:
        if next(steps) in (0, 3):
            raise ArithmeticError("once")
        return original(self, *args)

    original = Engine._draw
    monkeypatch.setattr(Engine, "_draw", take)
    others = [llm.start(prompt, DRAWN) for prompt in PROMPTS]  # so that no single request is blamed
    assert llm.generate(LONG, max_tokens=2, prompt_logprobs=0)[0].prompt_logprobs == want
    for job in others:
        llm.runner.cancel(job)
    idle(llm)


@pytest.mark.parametrize(
    "settings", [{"max_tokens": True}, {"ignore_eos": "yes"}, {"logit_bias": {1: 10**400}}], ids=str
)
def test_settings_of_a_wrong_type_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(KvarnError, match="it must be"):
        SamplingParams(**settings)


def test_a_seed_may_be_an_integer_of_numpy(llm: LLM) -> None:
    drawn = [
        llm.generate("ab", seed=seed, temperature=1, max_tokens=4)[0].tokens for seed in (3, np.int64(3), np.uint8(3))
    ]
    assert drawn[0] == drawn[1] == drawn[2]


# -- defaults --------------------------------------------------------------------------------------------------------


def test_chat_draws_and_text_is_greedy_by_default(llm: LLM) -> None:
    assert llm.chat_defaults["temperature"] == 0.7
    assert llm.chat_defaults["top_p"] == 0.95
    texts = {tuple(llm.chat("ab", max_tokens=12, ignore_eos=True, seed=seed).tokens) for seed in range(4)}
    assert len(texts) > 1, "not greedy"
    same = {tuple(llm.generate("ab", max_tokens=12, seed=seed)[0].tokens) for seed in range(4)}
    assert len(same) == 1
    assert chat_defaults({"temperature": 0.0})["temperature"] == 0.7, "never greedy"


def test_the_models_own_settings_are_the_defaults_of_chat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {
        "general.sampling.temp": ("f32", 0.6),
        "general.sampling.top_k": ("i32", 20),
        "general.sampling.min_p": ("f32", 7.0),
        "general.sampling.penalty_repeat": ("f32", 1.05),
    }
    path = tiny_gguf.write(tmp_path / "own.gguf", "llama", tiny_gguf.CHAT, keys=keys)
    own = own_sampling(open_checkpoint(path))
    assert own == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert "general.sampling.min_p is 7.0, which is out of range" in caplog.text
    defaults = LLM(path, context=64).chat_defaults
    assert {name: defaults[name] for name in own} == own
    assert (defaults["top_p"], defaults["min_p"]) == (0.95, 0.0)


@pytest.mark.parametrize(
    ("content", "own"),
    [
        ('{"temperature": 0.6, "top_k": -1, "do_sample": true}', {"temperature": 0.6, "top_k": 0}),
        ('{"temperature": null, "top_p": "x", "top_k": 1.5, "min_p": NaN}', {}),
        ('{"temperature": true, "repetition_penalty": -1, "top_p": 1e400}', {}),
        ("[1]", {}),
        ("{", {}),
        ("[" * 100_000, {}),
        (None, {}),
    ],
)
def test_a_folders_generation_config(tmp_path: Path, content: str | None, own: dict[str, float]) -> None:
    folder = write_hf(tmp_path, "llama")
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    assert own_sampling(open_checkpoint(folder)) == own


# -- the context -----------------------------------------------------------------------------------------------------


def test_prompt_and_answer_fill_the_context_and_no_more(llm: LLM) -> None:
    (cut,) = llm.generate("ab", max_tokens=10_000, ignore_eos=True)
    assert cut.prompt_tokens + len(cut.tokens) == 320
    assert (cut.finish_reason, cut.completions[0].limit) == ("length", "context")
    (short,) = llm.generate("ab", max_tokens=4, ignore_eos=True)
    assert (short.finish_reason, short.completions[0].limit) == ("length", "max_tokens")
    (last,) = llm.generate([97] * 319, max_tokens=10, ignore_eos=True)
    assert (len(last.tokens), last.completions[0].limit) == (1, "context")
    with pytest.raises(KvarnError, match="the prompt has 320 tokens and the context holds 320"):
        llm.generate([97] * 320)


@pytest.mark.parametrize("cache", ["ring", "sinks"])
def test_a_ring_goes_on_to_the_context_of_the_model(model: Path, cache: str) -> None:
    rolling = LLM(model, cache=cache, context=64, max_seqs=1, max_batch_tokens=64)
    (output,) = rolling.generate("ab of the night", max_tokens=10_000, ignore_eos=True)
    assert output.prompt_tokens + len(output.tokens) == 512
    assert output.completions[0].limit == "context"
    same = LLM(model, cache="sliding", window=64, pinned=4 if cache == "sinks" else 0, context=512, max_seqs=1)
    assert same.generate("ab of the night", max_tokens=10_000, ignore_eos=True)[0].tokens == output.tokens
    assert rolling.cache.plan.nbytes < same.cache.plan.nbytes


def test_a_longer_context_than_the_models_is_refused_with_the_remedy(model: Path) -> None:
    for cache in ("paged", "ring"):
        with pytest.raises(KvarnError, match="trained for 512 tokens; give at most that"):
            LLM(model, cache=cache, context=513)


# -- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [SamplingParams, Output, Completion, TokenLogprob])
def test_every_field_has_a_description(record: type) -> None:
    assert record.__doc__
    for each in fields(record):  # type: ignore[arg-type]
        assert re.search(rf"^    {each.name}  +\S", record.__doc__, re.MULTILINE), each.name


def test_every_parameter_of_an_llm_has_a_description() -> None:
    assert LLM.__doc__
    names = [name for name in LLM.__init__.__annotations__ if name != "return"]
    assert len(names) > 15
    for name in names:
        assert re.search(rf"^    {name}  +\S", LLM.__doc__, re.MULTILINE), name


def test_the_examples_of_the_python_page_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) >= 10
    names: dict[str, Any] = {}
    for block in blocks:
        example = block.replace('"smollm2"', json.dumps(str(model)))
        exec(compile(example, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "there is no setting 'temprature': did you mean temperature?" in out
