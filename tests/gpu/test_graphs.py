"""Decode steps as graphs: what is replayed has the bits of what is launched, and a graph never names memory that moved.

The recording driver refuses everything but launches while it captures, and a replay that names released memory.
Cells are NaN at the start, so a row that reads what nobody wrote shows.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu.support.driving import same_bits
from gpu.support.models import Batch, Loaded, text, write
from gpu.support.recording import RecordingDriver
from support.tiny_models import GOLDEN

from kvarn.backends.cuda import inbox, specs, tiling
from kvarn.backends.cuda.inbox import BUCKETS, in_bucket, split_bucket
from kvarn.backends.cuda.program import LOGIT_ROWS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.engine.params import SamplingParams

ONE = replace(GOLDEN, n_layers=1, window=10)
TWO = replace(GOLDEN, n_layers=2, window=20)
SLIDING = dict(strategy="sliding", window=20, block_size=16, max_chunk=16)


@pytest.fixture
def loaded(cuda, tmp_path: Path) -> Loaded:
    return Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=64)


def batch_of(loaded: Loaded, context: int, max_seqs: int, **settings) -> Batch:
    batch = Batch(loaded, context, max_seqs, **settings)
    batch.memory.driver.fill(batch.memory.arena.address, 0xFF, batch.memory.arena.nbytes)
    return batch


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("settings", [{}, SLIDING], ids=["paged", "sliding"])
def test_three_sequences_in_a_bucket_of_four(cuda, tmp_path: Path, architecture: str, settings: dict) -> None:
    """Lengths beyond, at and below the window. The first table is shifted, and rows that pad the bucket name it."""
    loaded = Loaded(write(tmp_path / "tiny.gguf", architecture, "BF16", TWO), cuda, max_tokens=64)
    texts = {seq: text(n + 4, n) for seq, n in enumerate((70, 18, 3))}
    batch = batch_of(loaded, 96, 3, **settings)
    for seq, tokens in texts.items():
        for start in range(0, len(tokens) - 4, 16):
            batch.step({seq: tokens[:-4][start : start + 16]})
    if settings:
        assert batch.memory._inbox._shifts[0].tolist() == [2, 0, 0]
    graphs = loaded.program.graphs
    done = graphs.captured, graphs.replayed
    rows = [batch.step({seq: [texts[seq][batch.lengths[seq]]] for seq in texts}) for _ in range(4)]
    assert (graphs.captured - done[0], graphs.replayed - done[1]) == (1, 4)
    assert all(call.grid[0] == 4 for call in cuda._driver.launches("rotate")[-8:]), "rows of the bucket"
    for seq, tokens in texts.items():
        alone = loaded.logits(tokens, 16, len(tokens) - 5, **settings)
        assert same_bits(np.concatenate([each[seq] for each in rows]), alone[-4:]), seq


@pytest.mark.parametrize("codec", ["int8", "int8/int4"])
def test_codes(cuda, tmp_path: Path, codec: str) -> None:
    """Graphs whose steps fill tiles of some sequences, beside a run that is launched."""
    loaded = Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=64)
    texts = {seq: text(n + 3, n) for seq, n in enumerate((62, 30, 3))}
    batch = batch_of(loaded, 96, 3, codec=codec, block_size=32)
    batch.step({seq: tokens[:-3] for seq, tokens in texts.items()})
    rows = [batch.step({seq: [texts[seq][batch.lengths[seq]]] for seq in texts}) for _ in range(3)]
    assert loaded.program.graphs.replayed == 3
    for seq, tokens in texts.items():
        alone = loaded.logits(tokens, len(tokens), len(tokens) - 4, codec=codec, block_size=32)
        assert same_bits(np.concatenate([each[seq] for each in rows]), alone[-3:]), seq


def test_products_with_a_split_depth(cuda, tmp_path: Path) -> None:
    """A graph has a program per split; a prompt of more rows than SHARED_ROWS has one for all of them."""
    size = replace(ONE, feed_forward=2100)
    loaded = Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", size), cuda, max_tokens=16)
    tokens = text(tiling.SHARED_ROWS + 2)
    whole = loaded.logits(tokens, len(tokens), 0)
    launched = cuda._driver.launches("linear")
    assert "turns" in {dict(call.kernel.constants)["MODE"] for call in launched}
    batch = batch_of(loaded, 300, 3)
    batch.step({0: tokens[:-2], 1: tokens[:9], 2: tokens[:1]})
    for i in range(2):
        rows = batch.step({0: [tokens[i - 2]], 1: [tokens[9 + i]], 2: [tokens[1 + i]]})
        for seq, pos in ((0, len(tokens) - 2 + i), (1, 9 + i), (2, 1 + i)):
            assert same_bits(rows[seq], whole[pos : pos + 1]), (seq, pos)
    assert loaded.program.graphs.replayed == 2
    assert 2 in {call.grid[1] for call in cuda._driver.launches("linear")[len(launched) :]}


def test_batches_that_grow_and_shrink(loaded: Loaded) -> None:
    """Sequences come and go in one cache; every size has a bucket, and none is captured twice."""
    texts = {seq: text(30, seq) for seq in range(5)}
    batch = batch_of(loaded, 64, 5)
    for seq, tokens in texts.items():
        batch.step({seq: tokens[: 3 * seq + 1]})
    sizes = ([0, 1, 2], [4], [0, 1, 2, 3, 4], [2, 3], [0, 3, 4], [1], [4, 2, 0])
    captured = loaded.program.graphs.captured
    for order in sizes:
        rows = batch.step({seq: [texts[seq][batch.lengths[seq]]] for seq in order})
        for seq in order:
            known = texts[seq][: batch.lengths[seq]]
            assert same_bits(rows[seq], Batch(loaded, 64, 1).step({0: known})[0]), (order, seq)
    assert loaded.program.graphs.captured - captured == 4, "of 1, 2, 4 and 8 rows"


def test_context_that_grows_over_the_edges_of_buckets_of_splits(loaded: Loaded) -> None:
    """One, two and three splits: the last two are in buckets of 2 and 4."""
    batch = batch_of(loaded, 1100, 2)
    tokens = text(514)
    batch.step({0: tokens[:255], 1: [1, 2]})
    whole = loaded.logits(tokens, len(tokens), 0)
    splits = []
    for start, stop in ((255, 258), (511, 514)):
        if batch.lengths[0] < start:
            batch.step({0: tokens[batch.lengths[0] : start]})
        for pos in range(start, stop):
            rows = batch.step({0: [tokens[pos]], 1: [5]})
            assert same_bits(rows[0], whole[pos : pos + 1]), pos
            splits.append(loaded.backend._driver.launches("decode")[-1].argument("n_splits"))
    assert splits == [1, 2, 2, 2, 4, 4]


def test_graphs_are_dropped_when_memory_moves(loaded: Loaded) -> None:
    """A larger step moves the workspace and the inbox, and another cache has other memory."""
    graphs, tokens = loaded.program.graphs, text(200)
    batch = batch_of(loaded, 256, 2)
    batch.step({0: tokens[:5]})
    batch.step({0: tokens[5:6]})
    assert graphs.captured == 1
    batch.step({1: tokens[:180]})
    rows = batch.step({0: tokens[6:7]})
    assert graphs.captured == 2
    other = batch_of(loaded, 256, 2)
    other.step({0: tokens[:6]})
    assert same_bits(other.step({0: tokens[6:7]})[0], rows[0])
    assert graphs.captured == 3
    expected = loaded.logits(tokens[:8], 8, 6)
    assert same_bits(batch.step({0: tokens[7:8]})[0], expected[-1:])
    assert graphs.captured == 4, "back to the first cache"
    sampler = loaded.program._sampler
    sampler.begin(sampler.tokens.nbytes // (4 * LOGIT_ROWS) + 1)  # draws of more rounds than there is room for
    assert same_bits(batch.step({0: tokens[8:9]})[0], loaded.logits(tokens[:9], 9, 8)[-1:])
    assert graphs.captured == 5, "a graph names the array of sampled tokens"


def test_what_is_not_a_graph(loaded: Loaded) -> None:
    """Runs of tokens, rows that nobody wants, and steps larger than every bucket."""
    graphs = loaded.program.graphs
    batch = batch_of(loaded, 64, 2)
    batch.step({0: [1, 2], 1: [3]})
    batch.step({0: [1, 2], 1: [3]})
    book = batch.book
    assert book.reserve(0, 5)
    assert book.reserve(1, 3)
    loaded.program.run(batch.memory, book.prepare([0, 1]), [1, 2], [1])
    assert (graphs.captured, graphs.replayed) == (0, 0)


def test_timed_steps_are_launched(loaded: Loaded) -> None:
    batch = batch_of(loaded, 64, 1)
    batch.step({0: [1, 2]})
    first = batch.step({0: [3]})[0]
    loaded.program.trace(True)
    again = batch_of(loaded, 64, 1)
    again.step({0: [1, 2]})
    assert same_bits(again.step({0: [3]})[0], first)
    assert loaded.program.graphs.replayed == 1
    assert "decode 0" in {span.name for span in loaded.program.timings()}


def test_preemption_moves_and_copies(loaded: Loaded) -> None:
    """An engine under pressure, with samples that share blocks, against each request alone."""
    drawn = SamplingParams(max_tokens=8, logprobs=2, temperature=0.9, seed=3, n=2, ignore_eos=True)
    asked = [([*text(20), *text(4, i)], drawn if i == 1 else replace(drawn, n=1, max_tokens=12)) for i in range(4)]

    def answers(engine, some) -> list[list[list[int]]]:
        requests = [engine.add(prompt, params) for prompt, params in some]
        while engine.busy:
            engine.step()
        engine.cache.check()
        return [[sample.output for sample in request.samples] for request in requests]

    block = loaded.cache(16, block_size=16)[1].plan.nbytes
    engine = loaded.engine(48, 24, block_size=16, max_seqs=4, cache_bytes=5 * block)
    found = answers(engine, asked)
    assert engine.scheduler.n_preemptions > 0
    assert engine.memory.counters.copied > 0
    assert loaded.program.graphs.replayed > 10
    loaded.program.trace(True)  # launches without graphs
    alone = [answers(loaded.engine(48, 48, strategy="contiguous", max_seqs=2), [each])[0] for each in asked]
    assert found == alone


def test_buckets() -> None:
    assert [in_bucket(n) for n in (1, 2, 3, 4, 5, 129, 256, 257, 5000)] == [1, 2, 4, 4, 8, 256, 256, 257, 5000]
    group = plan(CacheConfig([LayerSpec(1, 1, 8, 8)], 1000, "paged", "bf16", max_chunk=1000), "head-major").groups[0]
    assert inbox.all_splits(group) == 5
    assert [split_bucket(group, n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]
    assert BUCKETS[-1] == tiling.SHARED_ROWS, "decode steps have programs for each split of a product"


class TestRecordingDriver:
    """What the tests above rely on."""

    def launch(self, driver: RecordingDriver, address: int) -> None:
        driver.launch(driver.function(specs.edit()), (1, 1, 1), (address, address, 0))

    def test_a_capture_runs_nothing_and_a_replay_everything(self) -> None:
        driver = RecordingDriver()
        address = driver.allocate(64)
        graph = driver.capture(lambda: self.launch(driver, address))
        assert driver.launches() == []
        driver.replay(graph)
        driver.replay(graph)
        assert [call.args[0] for call in driver.launches("edit")] == [address] * 2

    @pytest.mark.parametrize("verb", ["allocate", "synchronize", "upload"])
    def test_only_launches_are_captured(self, verb: str) -> None:
        driver = RecordingDriver()
        address = driver.allocate(64)
        does = {
            "allocate": lambda: driver.allocate(64),
            "synchronize": driver.synchronize,
            "upload": lambda: driver.upload(address, np.zeros(4, np.uint8)),
        }
        with pytest.raises(AssertionError, match=f"{verb} while launches are captured"):
            driver.capture(does[verb])
        driver.synchronize()

    def test_a_graph_that_names_released_memory_is_refused(self) -> None:
        driver = RecordingDriver()
        address = driver.allocate(64)
        graph = driver.capture(lambda: self.launch(driver, address))
        driver.release(address)
        with pytest.raises(AssertionError, match="which was released"):
            driver.replay(graph)
        driver._next = address
        assert driver.allocate(64) == address
        with pytest.raises(AssertionError, match="another allocation now"):
            driver.replay(graph)
