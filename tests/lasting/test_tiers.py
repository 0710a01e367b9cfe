"""Host and disk tiers behind an engine: a prompt served from them has the answer that it has cold, bit for bit."""

import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import tiny, tiny_gguf
from support.tiers import SPACE, Hanging, ask, asked, files, reads

from kvarn import LLM, arithmetic
from kvarn.cache.adoption import Reason
from kvarn.cache.codec import CODECS, codecs_of
from kvarn.engine.because import summary
from kvarn.engine.explain import explain, to_json
from kvarn.errors import KvarnError
from kvarn.lasting import spilling
from kvarn.lasting import tiers as tiers_module
from kvarn.lasting.block_file import Name
from kvarn.lasting.folder import Folder
from kvarn.lasting.host import Held, HostMemoryTier
from kvarn.lasting.tiers import BlockTiers
from kvarn.words import counted

RNG = random.Random(5)
TEXT = [RNG.randrange(250) for _ in range(120)]
SIZE = 16
SETTINGS = dict(cache="paged", context=256, block_size=SIZE, max_seqs=3, max_batch_tokens=64, threads=1, backend="cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for variant in ("llama", "gemma3"):
        tiny_gguf.write(folder / f"{variant}.gguf", variant, tiny_gguf.CHAT)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "kvarn"))


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than any disk reads. Tests of that choice use other speeds."""
    monkeypatch.setattr(tiers_module, "GUESS", 1e-3)
    monkeypatch.setattr(BlockTiers, "computed", lambda *_: None)


CASES = (
    [pytest.param("llama", dict(cache_type=codec), id=f"paged {codec}") for codec in CODECS]
    + [
        pytest.param("llama", dict(cache="sliding", window=40, cache_type=codec), id=f"sliding {codec}")
        for codec in CODECS
    ]
    + [
        pytest.param("llama", dict(cache="sliding", window=24, pinned=20), id="sliding pinned"),
        pytest.param("gemma3", {}, id="two groups"),
        pytest.param("gemma3", dict(cache="sliding", window=50), id="two windows"),
    ]
)


@pytest.mark.parametrize(("variant", "settings"), CASES)
def test_an_answer_from_a_tier_is_the_answer_computed_cold(models: Path, tmp_path: Path, variant, settings) -> None:
    path, chosen = models / f"{variant}.gguf", SETTINGS | settings
    chosen["block_size"] = size = max(SIZE, codecs_of(chosen.get("cache_type", "bf16")).tail)
    full = len(TEXT) // size * size
    longer = TEXT + [RNG.randrange(250) for _ in range(30)]
    with LLM(path, **chosen) as llm:
        cold = ask(llm.engine, TEXT) + ask(llm.engine, longer)
    with LLM(path, **chosen, disk_cache=tmp_path / "d") as llm:
        assert ask(llm.engine, TEXT) == cold[:1]
    with LLM(path, **chosen, disk_cache=tmp_path / "d") as llm:
        ((request, answer),) = asked(llm.engine, longer)
        assert [answer] == cold[1:]
        assert request.adoption.reused == request.fetched.disk_tokens == full, "the full blocks of 120 tokens"
        assert llm.engine.tiers.counts()["disk"].drops == 0
    with LLM(path, **chosen, host_cache=10**8) as llm:
        assert ask(llm.engine, TEXT) == cold[:1]
        for _ in range(8):  # others take its room
            ask(llm.engine, *([RNG.randrange(250) for _ in range(200)] for _ in range(3)))
        ((request, answer),) = asked(llm.engine, longer)
        assert [answer] == cold[1:]
        assert request.fetched.host_tokens > 0
        assert request.adoption.reused == full


def test_twenty_conversations_survive_two_restarts(models: Path, tmp_path: Path) -> None:
    """Computed again are at most a block of each conversation, and the new tokens."""
    rng = random.Random(1)
    texts = [[rng.randrange(250) for _ in range(rng.randrange(40, 90))] for _ in range(20)]
    make = partial(LLM, models / "llama.gguf", **SETTINGS | dict(max_seqs=8))
    cold = make()
    with make(disk_cache=tmp_path / "d") as llm:
        known = [0] * 20
        for turn in range(3):
            if turn:
                llm.close()
                llm = make(disk_cache=tmp_path / "d")
            for i, text in enumerate(texts):
                ((request, answer),) = asked(llm.engine, text)
                assert ask(cold.engine, text) == [answer]
                assert len(text) - request.adoption.reused <= len(text) - known[i] + SIZE
                known[i] = len(text) + len(answer) - 1  # the last token is not computed
                texts[i] = text + [token for token, _, _ in answer] + [rng.randrange(250) for _ in range(9)]
            llm.cache.check()
        llm.close()
    cold.close()


def test_other_bits_are_never_served(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced model file, another codec, window or block size, a release with other bits: other names."""
    path = tmp_path / "m.gguf"
    shutil.copy(models / "llama.gguf", path)
    make = partial(LLM, path, disk_cache=tmp_path / "d")
    with make(**SETTINGS) as llm:
        ask(llm.engine, TEXT)
    for other in (dict(cache_type="f32"), dict(cache="sliding", window=40), dict(block_size=32)):
        with make(**SETTINGS | other) as llm:
            assert asked(llm.engine, TEXT)[0][0].adoption.reused == 0, other
    with monkeypatch.context() as patched:
        patched.setattr(arithmetic, "VERSION", arithmetic.VERSION + 1)
        with make(**SETTINGS) as llm:
            assert asked(llm.engine, TEXT)[0][0].adoption.reused == 0
    with make(**SETTINGS | dict(cache_layout="token-major", max_seqs=2, context=160)) as llm:
        assert asked(llm.engine, TEXT)[0][0].fetched.disk_tokens == 112, "these decide no bits"
    tiny_gguf.write(path, "llama", tiny_gguf.CHAT, draw=lambda shape: 1.1 * _normal(shape))
    with make(**SETTINGS) as llm:
        assert asked(llm.engine, TEXT)[0][0].adoption.reused == 0, "the same name, other weights"


def _normal(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def test_salts_do_not_meet_in_a_tier(models: Path, tmp_path: Path) -> None:
    with LLM(models / "llama.gguf", **SETTINGS, disk_cache=tmp_path / "d") as llm:
        ask(llm.engine, TEXT, salt=b"one")
    with LLM(models / "llama.gguf", **SETTINGS, disk_cache=tmp_path / "d") as llm:
        assert asked(llm.engine, TEXT, salt=b"two")[0][0].adoption.reused == 0
        assert asked(llm.engine, TEXT, salt=b"one")[0][0].fetched.disk_tokens == 112


def test_damaged_files_cost_their_block_and_say_so(models: Path, tmp_path: Path) -> None:
    make = partial(LLM, models / "llama.gguf", **SETTINGS)
    with make() as llm:
        cold = ask(llm.engine, TEXT)
    for nth in range(7):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        with make(disk_cache=tmp_path / "d") as llm:
            ask(llm.engine, TEXT)
        path = sorted(files(tmp_path / "d"), key=lambda path: -path.stat().st_mtime_ns)[nth]  # in the order of the text
        data = bytearray(path.read_bytes())
        data[-1 - 37 * nth] ^= 1
        path.write_bytes(data)
        with make(disk_cache=tmp_path / "d") as llm:
            ((request, answer),) = asked(llm.engine, TEXT)
            assert [answer] == cold
            assert request.adoption.reused == 16 * nth
            assert request.adoption.limit == (Reason.DAMAGED, 112, None, None, (), None)
            found = to_json(explain(request), str)
            assert found["fetched"]["disk"]["tokens"] == 16 * nth
            assert "damaged file" in found["because"]
            assert llm.engine.tiers.counts()["disk"].drops == 1
        with make(disk_cache=tmp_path / "d") as llm:  # the block was written again at the end
            assert asked(llm.engine, TEXT)[0][0].adoption.reused == 112


def test_explanations_say_what_came_from_where(models: Path, tmp_path: Path) -> None:
    make = partial(LLM, models / "llama.gguf", **SETTINGS, disk_cache=tmp_path / "d")
    with make() as llm:
        ask(llm.engine, TEXT)
        usage = llm.cache.usage()
        assert (usage.external_queries, usage.external_hits) == (120, 0)
    with make() as llm:
        ((request, _),) = asked(llm.engine, TEXT)
        found = to_json(explain(request), str)
        assert found["reused_tokens"] == 112
        assert found["fetched"]["disk"]["tokens"] == 112
        assert found["fetched"]["disk"]["ms"] > 0
        assert found["fetched"]["host"] == {"tokens": 0, "ms": 0.0}
        assert "(112 from disk, read in " in summary(found)
        usage = llm.cache.usage()
        assert (usage.prefix_queries, usage.prefix_hits) == (120, 0)
        assert (usage.external_queries, usage.external_hits) == (120, 112)
        ((again, _),) = asked(llm.engine, TEXT)
        assert again.fetched.tokens == 0
        usage = llm.cache.usage()
        assert (usage.prefix_hits, usage.external_hits) == (119, 112)


def test_only_what_was_seen_twice_or_has_a_priority_is_written_before_the_end(models: Path, tmp_path: Path) -> None:
    fill = [[RNG.randrange(250) for _ in range(200)] for _ in range(12)]
    make = partial(LLM, models / "llama.gguf", **SETTINGS)
    written = []
    for priority, twice in ((0, False), (0, True), (1, False)):
        folder = tmp_path / str(len(written))
        with make(disk_cache=folder) as llm:
            for _ in range(2 if twice else 1):
                ask(llm.engine, TEXT, priority=priority)
            ask(llm.engine, *fill)
            llm.engine.tiers.drain()  # waits for the writer, and writes what is resident
            written.append(len(files(folder)))
            resident = sum(len(p.shelf.resident()) for p in llm.cache.placements)
            written[-1] -= resident
    assert written[0] == 0
    assert written[1] >= 7
    assert written[2] >= 7


def test_two_engines_share_a_folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "REFRESH", 0.0)
    make = partial(LLM, models / "llama.gguf", **SETTINGS)
    with make() as llm:
        cold = ask(llm.engine, TEXT)
    with make(disk_cache=tmp_path / "d") as one, make(disk_cache=tmp_path / "d") as two:
        ask(one.engine, TEXT)
        one.engine.tiers.drain()
        ask(two.engine, TEXT[60:])  # it lists the folder again
        two.engine.tiers.drain()
        ((request, answer),) = asked(two.engine, TEXT)
        assert [answer] == cold
        assert request.fetched.disk_tokens == 112
        for path in files(tmp_path / "d"):
            path.unlink()
        third = [7, *TEXT]
        assert ask(two.engine, third) == ask(one.engine, third)


def test_a_disk_that_hangs_stops_nobody(tmp_path: Path) -> None:
    """Neither the writer nor the reader comes back. Decoding goes on, and the prompt is computed in the end."""
    text = [token % tiny.VOCAB for token in TEXT[:100]]
    alone = ask(tiny.engine_of(block_size=16), text, [1, 2, 3], n=30)
    root = tmp_path / "d"
    root.mkdir()

    def engine(folder: Folder, **cache):
        make = lambda book, memory: BlockTiers(book, memory, None, folder, patience=0.05)  # noqa: E731
        return tiny.engine_of(tiers=make, block_size=16, **cache)

    first = engine(Folder(root, 1 << 30, SPACE))
    ask(first, text)
    first.tiers.drain()
    assert len(files(root)) >= 6
    reader = Hanging(root, 1 << 30)
    second = engine(reader)
    decoding = second.add([1, 2, 3], tiny.SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True))
    waiting = second.add(text, tiny.SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True))
    while decoding.samples[0].n_output < 30:  # the other one waits for the disk meanwhile
        second.step()
    assert reader.began.is_set()
    assert waiting.samples[0].n_output == 0
    second.cancel(waiting)
    assert not second.busy
    second.cache.check()
    second.tiers.drain()  # gives up
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(tiers_module, "GUESS", 1e6)  # computing is fast, so the fetch may take 0.05 s
        patched.setattr(tiers_module, "STUCK", 1e9)
        third = engine(Hanging(root, 1 << 30))
        ((request, answer),) = asked(third, text, n=30)
        assert request.adoption.limit.reason is Reason.TOO_SLOW
        assert request.adoption.reused == 0
        assert [answer] == alone[:1]
        patched.setattr(tiers_module, "STUCK", 0.0)
        other = [9, *text]
        ((request, _),) = asked(third, other, n=2)
        assert request.adoption.limit.reason is Reason.NOTHING_SHARED
        third.cache.reset()
        ((request, answer),) = asked(third, text, n=30)
        assert request.adoption.limit.reason is Reason.NOT_WORTH_IT
        assert "computing is faster" in to_json(explain(request), str)["because"]
        assert [answer] == alone[:1]


def test_the_queue_of_the_writer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    folder = Hanging(tmp_path / "d", 1 << 30, gets=False)
    monkeypatch.setattr(spilling, "QUEUED", 20_000)
    make = lambda book, memory: BlockTiers(book, memory, None, folder, patience=0.05)  # noqa: E731
    engine = tiny.engine_of(tiers=make, block_size=16, cache_bytes=tiny.blocks_of_16(12))
    for seed in range(8):
        rng = random.Random(seed)
        ask(engine, [rng.randrange(60) for _ in range(100)], priority=2)
    assert folder.began.is_set()
    assert engine.tiers.counts()["disk"].drops > 10
    engine.tiers.drain()


def test_what_leaves_host_memory_goes_to_the_folder(models: Path, tmp_path: Path) -> None:
    make = partial(LLM, models / "llama.gguf", **SETTINGS)
    with make() as llm:
        cold, size = ask(llm.engine, TEXT), len(llm.memory.read_block(0, 0))
    with make(host_cache=3 * size, disk_cache=tmp_path / "d") as llm:
        ask(llm.engine, TEXT)
        ask(llm.engine, TEXT)  # seen twice
        ask(llm.engine, *([RNG.randrange(250) for _ in range(200)] for _ in range(12)))
        assert llm.engine.tiers.counts()["host"].nbytes <= 3 * size
        llm.engine.tiers.drain()
        ((request, answer),) = asked(llm.engine, TEXT)
        assert [answer] == cold
        assert request.fetched.disk_tokens + request.fetched.host_tokens == request.adoption.reused == 112
        assert reads(llm)["disk"] > 0


def test_host_memory_compares_tokens() -> None:
    tier, name = HostMemoryTier(100), Name(0, b"k" * 16)
    assert tier.put(Held(name, (1, 2), b"x" * 40, False)) == []
    assert tier.get(name, (1, 2)) == b"x" * 40
    assert tier.get(name, (1, 3)) is None, "two prompts with the same hash"
    big = Held(Name(1, b"b" * 16), (3,), b"y" * 101, False)
    assert tier.put(big) == [big], "larger than the tier"
    left = tier.put(Held(Name(0, b"l" * 16), (5,), b"z" * 61, False))
    assert [held.name for held in left] == [name]
    assert (tier.nbytes, len(tier)) == (61, 1)


@pytest.mark.parametrize("cache", ["contiguous", "ring", "sinks", "head-major"])
def test_strategies_that_share_nothing_are_refused(models: Path, tmp_path: Path, cache: str) -> None:
    for tier in (dict(host_cache=10**6), dict(disk_cache=tmp_path / "d")):
        with pytest.raises(KvarnError, match="use paged or sliding"):
            LLM(models / "llama.gguf", cache=cache, **tier)


def test_a_prompt_that_fills_the_cache_comes_back_too(models: Path, tmp_path: Path) -> None:
    """Room is asked for the rest of the prompt, not for a whole chunk."""
    tight = SETTINGS | dict(context=128, max_seqs=1, max_batch_tokens=128)
    with LLM(models / "llama.gguf", **tight, disk_cache=tmp_path / "d") as llm:
        cold = ask(llm.engine, TEXT, n=4)
    with LLM(models / "llama.gguf", **tight, disk_cache=tmp_path / "d") as llm:
        ((request, answer),) = asked(llm.engine, TEXT, n=4)
        assert [answer] == cold
        assert request.fetched.disk_tokens == 112


def test_auto_becomes_paged(models: Path) -> None:
    with LLM(models / "llama.gguf", context=64, max_seqs=1, host_cache=10**6) as llm:
        assert llm.cache.plan.strategy.name == "paged"


def test_the_exit_of_the_interpreter_stores_what_is_resident(models: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvarn import LLM; m, d = sys.argv[1:]; "
        "llm = LLM(m, cache='paged', context=256, block_size=16, threads=1, backend='cpu', disk_cache=d); "
        f"llm.generate({TEXT}, max_tokens=2)"
    )
    subprocess.run([sys.executable, "-c", code, models / "llama.gguf", tmp_path / "d"], check=True)
    assert len(files(tmp_path / "d")) == 7, counted(7, "block")
