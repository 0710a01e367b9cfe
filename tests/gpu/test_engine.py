"""An engine over the backend in the interpreter: strategies, prefix hits, preemption, forks, and the Python API."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu.support.models import Loaded, text, write
from support import tiny_gguf
from support.tiny_models import GOLDEN

from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.lasting.folder import Folder
from kvarn.lasting.host import HostMemoryTier
from kvarn.lasting.tiers import BlockTiers
from kvarn.llm import LLM

ONE = replace(GOLDEN, n_layers=1, window=10)
TWO = replace(GOLDEN, n_layers=2, window=10)
GREEDY = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
Asked = tuple[list[int], SamplingParams]


def answers(engine: Engine, asked: Sequence[Asked]) -> list[list[list[tuple]]]:
    """Of each request and sample: tokens, log-probabilities and alternatives."""
    requests = [engine.add(prompt, params) for prompt, params in asked]
    found: dict[tuple[int, int], list[tuple]] = {}
    steps = 0
    while engine.busy:
        for event in engine.step():
            key = id(event.sample.request), event.sample.index
            found.setdefault(key, []).append((event.sampled.token, event.sampled.logprob, event.sampled.top))
        steps += 1
        assert steps < 1000, "the engine does not come to an end"
    engine.cache.check()
    return [[found[id(request), index] for index in range(request.params.n)] for request in requests]


def tokens(found: list[list[list[tuple]]]) -> list[list[int]]:
    return [[token for token, _, _ in sample] for request in found for sample in request]


@pytest.fixture
def loaded(cuda, tmp_path: Path) -> Loaded:
    return Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=64)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_greedy_answers_are_those_of_the_reference(cuda, tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, "F32", TWO)
    asked = [(text(n, n), GREEDY) for n in (1, 18, 5)]
    ours, theirs = (
        answers(Loaded(path, backend).engine(64, 12, codec="f32", max_seqs=2), asked) for backend in (cuda, Reference())
    )
    assert tokens(ours) == tokens(theirs)


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16"])
def test_answers_do_not_depend_on_the_strategy(loaded: Loaded, codec: str) -> None:
    """Log-probabilities are equal too, not only tokens."""
    asked = [(text(n, n), GREEDY) for n in (20, 3)]
    expected = answers(loaded.engine(64, 64, codec=codec, max_seqs=2, strategy="contiguous"), asked)
    for strategy in STRATEGIES:
        engine = loaded.engine(64, 12, codec=codec, max_seqs=2, strategy=strategy, pinned=0)
        assert answers(engine, asked) == expected, strategy


def test_a_prefix_hit_changes_no_bit(loaded: Loaded) -> None:
    shared = text(35)
    engine = loaded.engine(64, 64, block_size=16, max_seqs=2)
    first, again = ([*shared, *text(3, seed)] for seed in (1, 2))
    answers(engine, [(first, GREEDY)])
    read = engine.memory.counters.written
    request = engine.add(again, GREEDY)
    while engine.busy:
        engine.step()
    assert request.adoption is not None
    assert request.adoption.reused == 35
    assert engine.memory.counters.copied > 0, "a block matched in part"
    assert engine.memory.counters.written - read == (3 + 4) * engine.cache.plan.bytes_per_token
    alone = answers(loaded.engine(64, 64, strategy="contiguous"), [(again, GREEDY)])
    assert request.samples[0].output == tokens(alone)[0]


def test_preemption_and_forks_change_no_bit(loaded: Loaded) -> None:
    drawn = SamplingParams(max_tokens=8, logprobs=2, temperature=0.9, seed=3, n=2, ignore_eos=True)
    asked = [([*text(20), *text(4, i)], drawn if i == 1 else replace(GREEDY, max_tokens=12)) for i in range(4)]
    block = loaded.cache(16, block_size=16)[1].plan.nbytes
    engine = loaded.engine(48, 24, block_size=16, max_seqs=4, cache_bytes=5 * block)
    found = answers(engine, asked)
    assert engine.scheduler.n_preemptions > 0
    alone = [answers(loaded.engine(48, 48, strategy="contiguous", max_seqs=2), [each])[0] for each in asked]
    assert found == alone
    assert found[1][0] != found[1][1], "two samples of one prompt"


def test_the_python_api(cuda, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT, ONE)
    cuda._driver.total_bytes = 3 << 30  # a gibibyte beside the weights
    settings = dict(context=64, max_batch_tokens=16, cache_type="f32", cache_bytes=1 << 20)
    with LLM(path, backend=cuda, **settings) as ours, LLM(path, backend="reference", **settings) as theirs:
        prompts, params = ["abc", "a longer prompt"], SamplingParams(max_tokens=4, ignore_eos=True)
        found, expected = (llm.generate(prompts, params) for llm in (ours, theirs))
        assert [each.completions[0].tokens for each in found] == [e.completions[0].tokens for e in expected]
        assert ours.opened.facts["device"] == "Interpreter"


def test_evicted_blocks_come_back_from_host_memory_and_from_a_folder(loaded: Loaded, tmp_path: Path) -> None:
    """Device, host, disk and back, by the same seam."""
    asked = [(text(38, n), SamplingParams(max_tokens=2, logprobs=2, ignore_eos=True)) for n in range(2)]
    size = len(loaded.cache(64, block_size=16, max_seqs=1)[0].read_block(0, 0))
    settings = dict(block_size=16, max_seqs=1, cache_bytes=4 * size)
    plain = [answers(loaded.engine(64, 64, **settings), [each]) for each in asked]

    def tiers(book: KVCache, memory: Any) -> BlockTiers:
        slow = BlockTiers(book, memory, HostMemoryTier(9 * size), Folder(tmp_path, 1 << 30, b"s" * 16))
        slow.computed(100, 1e5)  # as if computing a token took minutes
        return slow

    engine = loaded.engine(64, 64, tiers, **settings)
    assert [answers(engine, [each]) for each in asked] == plain
    assert answers(engine, asked[:1]) == plain[0]
    assert engine.tiers.counts()["host"].reads >= 1
    engine.tiers.drain()
    again = loaded.engine(64, 64, tiers, **settings)
    assert answers(again, asked[1:]) == plain[1]
    assert again.tiers.counts()["disk"].reads == 2
    assert again.cache.usage().external_hits == 32


def test_a_snapshot_is_restored_through_the_same_memory(cuda, tmp_path: Path) -> None:
    """Made in paged blocks, restored in a slab of the device: the answer and its cells are those that were computed."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT, ONE)
    cuda._driver.total_bytes = 3 << 30
    settings = dict(context=64, max_batch_tokens=16, cache_type="bf16", backend=cuda, max_seqs=1, cache_bytes=1 << 20)
    prompt, params = text(21, 3), SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True)
    with LLM(path, cache="paged", block_size=16, **settings) as llm:
        plain = llm.generate([prompt], params)[0]
        llm.save_snapshot(tmp_path / "x.kvs", prompt)
    with LLM(path, cache="contiguous", snapshot=tmp_path / "x.kvs", **settings) as llm:
        again = llm.generate([prompt], params)[0]
        assert again.tokens == plain.tokens
        assert again.cached_tokens == len(prompt) - 1
        assert llm.fingerprint.device.startswith("compute 9.0 ")
        assert llm.snapshots.verify(tmp_path / "x.kvs", 2, 1, lambda *_: None) == 2
