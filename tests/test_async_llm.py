"""AsyncLLM: answers are those of LLM, the event loop stays free, and a cancelled task frees what it held."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import tiny_model
from support.threads import together, until

from kvarn import LLM, AsyncLLM, KvarnError, SamplingParams

PROMPTS = ["ab of the night", "cd and a fox", "the sea", "a cat, and what it was"]
DRAWN = SamplingParams(max_tokens=20, temperature=1.5, seed=3, n=2, logprobs=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture
def llm(model: Path) -> AsyncLLM:
    return AsyncLLM(model, cache="paged", max_seqs=4, max_batch_tokens=32, block_size=16)


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[..., Any]:
    oracle = LLM(model, cache="contiguous", max_seqs=2)
    return lambda prompt, params=DRAWN: oracle.generate(prompt, params)[0].completions


async def idle(llm: AsyncLLM) -> None:
    for _ in range(6000):
        if not llm.llm.cache.usage().sequences and not llm.llm.runner.busy:
            llm.llm.cache.check()
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is still held after a minute")


def test_many_tasks_get_the_answers_of_an_llm(llm: AsyncLLM, alone: Callable) -> None:
    async def stream(prompt: str) -> str:
        return "".join([piece async for piece in llm.stream(prompt, DRAWN, n=1)])

    async def main() -> None:
        batches = asyncio.gather(*(llm.generate([prompt, PROMPTS[0]], DRAWN) for prompt in PROMPTS * 3))
        texts = await asyncio.gather(*(stream(prompt) for prompt in PROMPTS * 3))
        assert texts == [alone(prompt)[0].text for prompt in PROMPTS * 3], "one answer of two has the same draws"
        for prompt, outputs in zip(PROMPTS * 3, await batches, strict=True):
            assert [output.completions for output in outputs] == [alone(prompt), alone(PROMPTS[0])]
        chat = await llm.chat([{"role": "user", "content": "ab"}], DRAWN, top_p=1)
        assert chat.completions == alone("<user>ab\n<assistant>")
        await idle(llm)

    asyncio.run(main())


def test_a_cancelled_task_frees_what_it_held(llm: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(llm.generate(prompt, LONG)) for prompt in PROMPTS]
        async for _ in llm.stream(PROMPTS[0], LONG):
            break
        while not llm.llm.cache.usage().sequences:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {asyncio.CancelledError}
        await idle(llm)

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_its_prompt_is_queued(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread has already begun to queue the prompt."""
    begun, go, started = threading.Event(), threading.Event(), []
    start = llm.llm.start

    def slow(*args: Any, **settings: Any) -> Any:
        begun.set()
        assert go.wait(60)
        started.append(start(*args, **settings))
        return started[0]

    monkeypatch.setattr(llm.llm, "start", slow)

    async def main() -> None:
        task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        while not (started and started[0].done):
            await asyncio.sleep(0.01)
        assert started[0].output().finish_reason == "cancelled"
        await idle(llm)

    asyncio.run(main())


def test_errors_reach_the_task_at_fault(llm: AsyncLLM, alone: Callable) -> None:
    run = llm.llm.program.run

    def fail(memory, step, tokens, wanted):
        if 33 in tokens:  # "!"
            raise RuntimeError("a kernel failed")
        return run(memory, step, tokens, wanted)

    llm.llm.engine.program.run = fail
    clean = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={33: -100.0})

    async def main() -> None:
        with pytest.raises(KvarnError, match="the prompt is empty"):
            await llm.generate([PROMPTS[0], []], LONG)
        good = asyncio.create_task(llm.generate(PROMPTS[0], clean))
        with pytest.raises(RuntimeError, match="a kernel failed"):
            await llm.generate("bad!", clean)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            [piece async for piece in llm.stream("bad!", clean)]
        assert (await good)[0].completions == alone(PROMPTS[0], clean)
        await idle(llm)

    asyncio.run(main())


def test_an_engine_that_fails_ends_every_task_with_the_error(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list:
        raise RuntimeError("the scheduler is broken")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.llm.engine.scheduler, "schedule", broken)
            results = await asyncio.gather(*(llm.generate(p, LONG) for p in PROMPTS), return_exceptions=True)
            assert {str(result) for result in results} == {"the scheduler is broken"}
        await idle(llm)
        assert (await llm.generate(PROMPTS[0], DRAWN))[0].text

    asyncio.run(main())


def test_event_loops_and_threads_share_a_model(llm: AsyncLLM, alone: Callable) -> None:
    async def ask() -> list[str]:
        return [(await llm.generate(prompt, DRAWN))[0].text for prompt in PROMPTS]

    results = together(
        *(lambda: asyncio.run(ask()) for _ in range(2)),
        *(lambda: [llm.llm.generate(prompt, DRAWN)[0].text for prompt in PROMPTS] for _ in range(2)),
    )
    assert results == [[alone(prompt)[0].text for prompt in PROMPTS]] * 4


def test_a_closed_model_ends_its_tasks(llm: AsyncLLM) -> None:
    async def main() -> None:
        async with llm:
            task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            async for _ in llm.stream(PROMPTS[1], LONG):
                break
        with pytest.raises(KvarnError, match="closed"):
            await task
        with pytest.raises(KvarnError, match="this AsyncLLM is closed"):
            await llm.generate(PROMPTS[0])

    asyncio.run(main())


def test_a_model_that_nobody_holds_is_freed(model: Path) -> None:
    """Its thread ends with it."""
    llm = AsyncLLM(model)
    program = weakref.ref(llm.llm.program)
    asyncio.run(llm.generate(PROMPTS[0], DRAWN))
    del llm
    gc.collect()
    until(lambda: program() is None)
