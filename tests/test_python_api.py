"""The Python API: what callers may give, what they get, and docs/python.md."""

import asyncio
import json
import re
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import tiny_model

from kvarn import LLM, AsyncLLM, KvarnError, SamplingParams
from kvarn.jobs.job import Completion, Output, TokenLogprob
from kvarn.jobs.pieces import Piece

ROOT = Path(__file__).parents[1]
PROMPTS = ["ab of the night", "cd and a fox", "the sea"]
DRAWN = SamplingParams(max_tokens=20, temperature=1.5, seed=3, n=2, ignore_eos=True)


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
    started = threading.Event()

    def slowly(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        """The answer would take seconds, and is left after its first tokens."""
        started.set()
        time.sleep(0.01)
        return logits

    async def main() -> None:
        async with AsyncLLM(llm) as model:
            answer = model.generate("ab", max_tokens=300, ignore_eos=True, logits_processors=slowly)
            unfinished = asyncio.create_task(answer)
            while not started.is_set():
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


def test_the_examples_of_the_python_page_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    model = tiny_model(tmp_path, 2048)  # its tokens are bytes
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) >= 10
    names: dict[str, Any] = {}
    for block in blocks:
        example = block.replace('"smollm2"', json.dumps(str(model)))
        exec(compile(example, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "there is no setting 'temprature': did you mean temperature?" in out
