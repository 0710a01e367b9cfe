"""An error or an interrupt at any line of the bookkeeping: nothing is held, and no answer is wrong."""

from pathlib import Path

import pytest
from support.any_line import AnyLine
from support.serving import tiny_model

from kvarn import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 9, [1, 2, 3] * 9 + [4, 5, 6, 7], [7, 8, 9] * 5]
SETTINGS = {
    "paged": {"cache": "paged", "block_size": 16},
    "paged, with preemptions": {"cache": "paged", "block_size": 16, "cache_bytes": 36 << 10},
    "contiguous": {"cache": "contiguous"},
    "ring": {"cache": "ring", "window": 16},
    "sinks": {"cache": "sinks", "window": 16},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[completion.tokens for completion in output.completions] for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_error_at_any_line(model: Path, settings: dict, error: type[BaseException]) -> None:
    """Every 61st line; `make attack` takes every line."""
    assert attack(model, settings, error, stride=61) > 50


def attack(model: Path, settings: dict, error: type[BaseException], stride: int) -> int:
    """Returns the number of lines tried."""
    llm = LLM(model, max_seqs=6, max_batch_tokens=16, context=64, **settings)
    expected, injected, n = answers(llm), AnyLine(), 0
    preempted = llm.engine.scheduler.n_preemptions
    assert bool(preempted) == ("cache_bytes" in settings)
    while True:
        try:
            got = injected.run(lambda: answers(llm), n * stride, error)
            if injected.where is None:
                return n
            assert got == expected, injected.where
        except error:
            pass
        usage = llm.cache.usage()
        held = (usage.sequences, usage.blocks_used, llm.engine.busy, len(llm.engine._requests), len(llm.runner._jobs))
        assert not any(held), (injected.where, held)
        llm.cache.check()
        assert answers(llm) == expected, injected.where
        n += 1
