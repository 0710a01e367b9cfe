"""The default size of a cache: on a device with memory of its own, what is left there after the weights."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cuda import GIB, FakeCuda
from support.null_backend import TOKEN, Null
from support.serving import tiny_model

from kvarn import LLM, KvarnError
from kvarn.backends import check_memory
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.room import MOST_BLOCKS, plan_into
from kvarn.cache.spec import LayerSpec
from kvarn.errors import OutOfMemory

SPEC = LayerSpec(8, 2, 64, 64)
CONFIG = CacheConfig([SPEC] * 4, 1024, "paged", max_seqs=4)
ONE = plan(replace(CONFIG, context=32, max_seqs=1)).nbytes  # a block of all layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def test_what_is_left_becomes_blocks() -> None:
    assert plan(CONFIG).n_blocks == 128, "what four sequences need"
    for blocks in (1, 100, 128, 5000):
        assert plan_into(blocks * ONE, CONFIG, "head-major").n_blocks == blocks
        assert plan_into(blocks * ONE + ONE - 1, CONFIG, "head-major").n_blocks == blocks
    with pytest.raises(OutOfMemory, match="one block more need"):
        plan_into(ONE - 1, CONFIG, "head-major")


def test_there_is_a_most_of_blocks() -> None:
    huge = 1 << 40
    assert plan_into(huge, CONFIG, "head-major").n_blocks == MOST_BLOCKS
    assert plan_into(huge, CONFIG, "head-major", most_blocks=300).n_blocks == 300
    assert plan_into(huge, CONFIG, "head-major", most_blocks=60).n_blocks == 128, "but what the sequences need"


def test_windows_are_not_cut_by_the_most() -> None:
    """Two groups: the one with a window has what its sequences need, the other one gets the rest."""
    mixed = replace(CONFIG, layers=[replace(SPEC, window=64), SPEC], max_chunk=64)
    needed, made = plan(mixed), plan_into(1 << 40, mixed, "head-major", most_blocks=1000)
    windowed = needed.groups[0].config.n_blocks
    assert [group.config.n_blocks for group in made.groups] == [windowed, 1000 - windowed]


def test_groups_without_a_window_share_the_most() -> None:
    wide = replace(CONFIG, layers=[SPEC, LayerSpec(8, 4, 64, 64), SPEC])
    for most in (1000, 1001):
        assert [group.config.n_blocks for group in plan_into(1 << 40, wide, "head-major", most).groups] == [500, 500]


@pytest.mark.parametrize("strategy", ["contiguous", "ring", "sliding"])
def test_other_strategies_take_what_their_sequences_need(strategy: str) -> None:
    config = replace(CONFIG, strategy=strategy, window=None if strategy == "contiguous" else 128, max_chunk=64)
    assert plan_into(1 << 40, config, "head-major") == plan(config, "head-major")


def test_whole_sequences_are_fewer_if_there_is_less_room() -> None:
    config = replace(CONFIG, strategy="contiguous")
    whole = plan(config).nbytes
    assert plan_into(whole * 3 // 4, config, "head-major").nbytes == whole * 3 // 4
    with pytest.raises(OutOfMemory, match="one sequence of 1024 tokens"):
        plan_into(whole // 4 - 1, config, "head-major")


def test_a_device_loads_the_weights_first_and_then_takes_what_is_left(model: Path) -> None:
    backend = FakeCuda(free=2 * GIB, taken=2 * GIB - 50_000_000)
    llm = LLM(model, context=256, max_seqs=2, cache="paged", backend=backend)
    assert backend.events == ["load", f"memory {llm.cache.plan.nbytes}"]
    assert 49_900_000 < llm.cache.plan.nbytes <= 50_000_000
    assert llm.generate([1, 2, 3], max_tokens=2, ignore_eos=True)[0].tokens == [TOKEN, TOKEN]


def test_a_given_size_is_allocated_before_the_weights(model: Path) -> None:
    backend = FakeCuda()
    llm = LLM(model, context=256, cache="paged", cache_bytes=1 << 20, backend=backend)
    assert backend.events == [f"memory {llm.cache.plan.nbytes}", "load"]
    assert llm.cache.plan.nbytes <= 1 << 20
    with pytest.raises(OutOfMemory, match=r"1026\.0 GiB beside them, and NVIDIA H200 has 131\.0 GiB free"):
        LLM(model, context=256, cache="paged", cache_bytes=1 << 40, backend=backend)


def test_the_host_takes_what_its_sequences_need(model: Path) -> None:
    null, cpu = (LLM(model, context=64, max_seqs=3, cache="paged", backend=each) for each in (Null(), "cpu"))
    assert null.cache.plan.n_blocks == cpu.cache.plan.n_blocks == 3 * 2


def test_wrong_settings_fail_before_the_weights_are_loaded(model: Path) -> None:
    for settings in ({"block_size": 24}, {"cache": "nothing"}, {"cache_type": "f16/int8"}, {"context": 10**6}):
        backend = FakeCuda()
        with pytest.raises(KvarnError):
            LLM(model, backend=backend, **({"context": 64} | settings))
        assert not backend.events


def test_the_words_about_memory_name_the_place() -> None:
    class Small(Null):
        memory_bytes = 1000

    with pytest.raises(OutOfMemory, match=r"and this machine has 0\.0 GiB of memory"):
        check_memory(plan(CONFIG), Small())
