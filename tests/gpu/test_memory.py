"""The memory of a cache on the device: what a step sends, what is allocated, counted, released and refused."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from gpu.support.driving import Driven, same_bits, workload
from gpu.support.recording import RecordingDriver

from kvarn.backends.cuda import memory as memory_module
from kvarn.backends.cuda.backend import Cuda
from kvarn.backends.cuda.inbox import Inbox, most_splits
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step
from kvarn.errors import BadArray, BadStep, KvarnError, OutOfMemory, UnknownLayer

SPEC = LayerSpec(4, 2, 8, 8)
LAYOUTS = ("token-major", "head-major", "repeated")


def planned(spec: LayerSpec = SPEC, **settings):
    given = dict(context=64, strategy="paged", codec="bf16", block_size=16, max_seqs=3, max_chunk=64) | settings
    return plan(CacheConfig([spec, spec], **given), "head-major")


def steps(made, batches: list[dict[int, int]]) -> list[Step]:
    """Steps of a book, as if they were applied."""
    book, lengths, found = KVCache(made), {}, []
    for batch in batches:
        for seq, n in batch.items():
            if seq not in lengths:
                book.open(seq, salt=bytes([seq]))
            lengths[seq] = lengths.get(seq, 0) + n
            assert book.reserve(seq, lengths[seq])
        found.append(book.prepare(list(batch)))
        for seq, n in batch.items():
            book.advance(seq, n)
            book.commit(seq, [5] * n)
    return found


class TestInbox:
    """The integers of a step, with a driver that only records, or one that also stores."""

    def test_every_array_is_on_the_device(self, driver) -> None:
        made = planned()
        box = Inbox(driver, made)
        for step in steps(made, [{0: 3, 1: 1, 2: 1}, {0: 1, 1: 6, 2: 1}, {2: 40}, {0: 1}]):
            tokens = list(range(100, 100 + len(step.positions)))
            wanted = list(range(0, len(tokens), 2))
            frame = box.send(step, tokens, wanted)

            def read(address: int, n: int) -> list[int]:
                return driver.view(address, (n,), np.int32).tolist()

            n = len(tokens)
            starts = np.cumsum([0, *step.n_new])[:-1]
            assert (frame.n_tokens, frame.n_wanted, frame.longest_run) == (n, len(wanted), max(step.n_new))
            assert read(frame.tokens, n) == tokens
            assert read(frame.positions, n) == step.positions
            assert read(frame.wanted, len(wanted)) == wanted
            assert read(frame.rows, n) == np.repeat(step.rows, step.n_new).tolist()
            singles = [start for start, new in zip(starts, step.n_new, strict=True) if new == 1]
            runs = [(start, new) for start, new in zip(starts, step.n_new, strict=True) if new > 1]
            assert read(frame.singles, frame.n_singles) == singles
            assert list(zip(read(frame.runs, frame.n_runs), read(frame.counts, frame.n_runs), strict=True)) == runs
            assert read(frame.groups[0].cells, n) == step.groups[0].cells

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_a_step_of_single_tokens_is_padded_to_its_bucket(self, driver, n: int) -> None:
        """Also what it sends is no more than the bucket needs."""
        made = planned()
        box, bucket = Inbox(driver, made), (1, 2, 4)[n - 1]
        todo = steps(made, [{0: 40}, dict.fromkeys(range(n), 1), dict.fromkeys(range(n), 1)])
        box.send(todo[0], [0] * 40, [0])
        frames = [box.send(step, [7] * n, list(range(n))[::-1]) for step in todo[1:]]
        spare = list(range(n, bucket))

        def read(address: int) -> list[int]:
            return driver.view(address, (bucket,), np.int32).tolist()

        step, frame = todo[2], frames[1]
        assert (frame.n_tokens, frame.bucket, frame.padded().n_tokens) == (n, bucket, bucket)
        assert read(frame.tokens) == [7] * n + [0] * len(spare)
        assert read(frame.positions) == step.positions + [-1] * len(spare)
        assert read(frame.rows) == step.rows + [0] * len(spare)
        assert read(frame.wanted) == list(range(n))[::-1] + spare
        assert read(frame.singles) == list(range(bucket))
        assert read(frame.groups[0].cells) == step.groups[0].cells + [-1] * len(spare)
        assert frames[0].positions == frame.positions, "a graph reads it at this address"
        assert driver.calls[-2].args[1] <= 4 * 4 * (8 + 2 * n)
        assert box.send(step, [7] * n, []).bucket == 0, "not all rows are wanted"

    @pytest.mark.parametrize("what", ["allocate", "pinned"])
    def test_it_works_after_a_lack_of_memory(self, driver, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        made = planned()
        box = Inbox(driver, made)
        first, second = steps(made, [{0: 3}, {0: 40}])
        box.send(first, [1] * 3, [2])

        def full(nbytes: int) -> int:
            raise OutOfMemory("the device is full")

        with monkeypatch.context() as patch:
            patch.setattr(driver, what, full)
            with pytest.raises(OutOfMemory):
                box.send(second, [2] * 40, [0])
        frame = box.send(second, [2] * 40, [0])
        assert driver.view(frame.tokens, (40,), np.int32).tolist() == [2] * 40

    @pytest.mark.parametrize("sizes", [[1, 2, 3, 5, 7, 64], [64, 1, 63], [13, 14, 15, 16, 17]])
    def test_addresses_are_aligned_whatever_the_size(self, sizes: list[int]) -> None:
        driver, made = RecordingDriver(), planned(context=256, max_seqs=8, max_chunk=64)
        box = Inbox(driver, made)
        for step in steps(made, [{seq: n} for seq, n in enumerate(sizes)]):
            frame = box.send(step, [0] * len(step.positions), [0])
            edits = [group.edits.address for group in frame.groups]
            arrays = ("tokens", "positions", "rows", "wanted", "singles", "runs", "counts")
            for address in [getattr(frame, name) for name in arrays] + edits + [g.cells for g in frame.groups]:
                assert address % 16 == 0

    def test_two_buffers_take_turns_and_nothing_is_allocated_again(self) -> None:
        driver, made = RecordingDriver(), planned()
        box, sent = Inbox(driver, made), []
        send = driver.send
        driver.send = lambda address, data: (sent.append(data.ctypes.data), send(address, data))
        todo = steps(made, [{0: 5}, *[{0: 1}] * 9])
        box.send(todo[0], [0] * 5, [4])
        before = len(driver.calls)
        for step in todo[1:]:
            box.send(step, [0], [0])
        assert {call.verb for call in driver.calls[before:]} == {"wait", "send", "record"}
        assert len(set(sent)) == 2
        assert all(a != b for a, b in pairwise(sent))

    def test_the_host_waits_before_it_writes_again(self) -> None:
        """The recording driver refuses pinned memory that changes before it arrived; without the wait it does."""
        driver, made = RecordingDriver(), planned()
        box = Inbox(driver, made)
        driver.wait = lambda event: None
        todo = steps(made, [{0: 5}, *[{0: 1}] * 4])
        for step in todo:
            box.send(step, list(range(len(step.positions))), [0])
        with pytest.raises(AssertionError, match="pinned memory was changed"):
            driver.synchronize()
        driver._in_flight.clear()


@pytest.mark.parametrize("window", [None, 1, 40, 256, 300])
@pytest.mark.parametrize("pinned", [0, 4, 256, 261, 600])
def test_splits_that_a_query_may_see(window: int | None, pinned: int) -> None:
    """`most_splits` counts every split with a key that is seen, by the rule of the spec."""
    spec, keys = LayerSpec(1, 1, 8, 8, window, pinned), np.arange(1100)
    for pos in (0, 1, 39, 40, 255, 256, 300, 511, 512, 560, 600, 800, 1099):
        seen = np.unique(keys[spec.visible(pos, keys)] // 256)
        assert most_splits(spec, np.array([pos])) >= len(seen), pos
        assert most_splits(spec, np.array([pos])) <= len(seen) + 1, "hardly more than needed"
    assert most_splits(spec, np.array([], np.int64)) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["f32", "f16", "bf16", "int8", "int8/int4"])
def test_a_block_has_the_bytes_of_the_reference(cuda, layout: str, codec: str) -> None:
    made = planned(layout=layout, strategy="contiguous", codec=codec, block_size=32)
    ours, theirs = cuda.memory(made), Reference().memory(made)
    n = len(theirs.read_block(0, 0))
    for block in (0, made.groups[0].config.n_blocks - 1):
        data = np.random.default_rng(block).integers(0, 256, n).astype(np.uint8).tobytes()
        ours.write_block(0, block, data)
        theirs.write_block(0, block, data)
        assert ours.read_block(0, block) == theirs.read_block(0, block) == data
    arena = np.zeros(made.nbytes, np.uint8)
    cuda._driver.download(ours.arena.address, arena)
    written = np.flatnonzero(theirs.arena)
    assert (arena[written] == theirs.arena[written]).all(), "repeated heads are written too"
    with pytest.raises(BadArray, match=f"has {n:,} bytes, not 3"):
        ours.write_block(0, 0, b"abc")


def test_scratch_for_few_tokens_gives_the_same_bits(cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little scratch, decode runs in several launches."""
    config = CacheConfig([SPEC], 64, "paged", "bf16", block_size=16, max_seqs=11, max_chunk=8)
    schedule = [dict.fromkeys(range(11), 3), dict.fromkeys(range(11), 1)]
    data = workload([SPEC], schedule)
    whole = Driven(cuda, config).run(schedule, data)
    launches = len(cuda._driver.launches("decode"))
    monkeypatch.setattr(memory_module, "MOST_SCRATCH", 1)
    found = Driven(cuda, config).run(schedule, data)
    assert launches == 1
    assert len(cuda._driver.launches("decode")) - launches == 2, "eight tokens, then three"
    assert all(same_bits(found[key], whole[key]) for key in whole)


def test_more_runs_than_a_grid_takes(cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CacheConfig([SPEC], 64, "paged", "bf16", block_size=16, max_seqs=9, max_chunk=8)
    schedule = [dict.fromkeys(range(9), 2), dict.fromkeys(range(9), 1)]
    data = workload([SPEC], schedule)
    whole = Driven(cuda, config).run(schedule, data)
    monkeypatch.setattr(memory_module, "MOST_IN_GRID", 4)
    found = Driven(cuda, config).run(schedule, data)
    assert [call.grid[2] for call in cuda._driver.launches("prefill")] == [9, 4, 4, 1]
    assert [call.grid[2] for call in cuda._driver.launches("decode")] == [9, 4, 4, 1]
    assert all(same_bits(found[key], whole[key]) for key in whole)


def test_counters_are_those_of_the_reference(cuda) -> None:
    """Writes, reads, copies and calls, also of windows, and of heads that are stored several times."""
    caches = (
        dict(strategy="paged"),
        dict(strategy="repeated"),
        dict(strategy="sinks", window=20, pinned=3),
        dict(strategy="paged", codec="int8/int4"),
    )
    for settings in caches:
        config = CacheConfig([SPEC], 64, block_size=32, max_seqs=2, max_chunk=64, **(dict(codec="bf16") | settings))
        schedule = [{0: 30, 1: 1}, {0: 1}, {0: 2, 1: 3}, {0: 1, 1: 1}]
        data = workload([SPEC], schedule)
        ours = Driven(cuda, config)
        ours.run(schedule, data)
        theirs = Reference().layers(plan(config, "head-major"))
        book = KVCache(theirs.plan)
        done = {0: 0, 1: 0}
        for seq in done:
            book.open(seq, salt=bytes([seq]))
        for batch in schedule:
            for seq, n in batch.items():
                assert book.reserve(seq, done[seq] + n)
            step = book.prepare(list(batch))
            theirs.apply(step)
            rows = [(data[seq, 0], done[seq], done[seq] + batch[seq]) for seq in step.seqs]
            q, k, v = (np.concatenate([getattr(x, name)[a:b] for x, a, b in rows]) for name in ("q", "k", "v"))
            theirs.write(0, k, v)
            theirs.attend(0, q)
            for seq, n in batch.items():
                book.advance(seq, n)
                book.commit(seq, range(done[seq], done[seq] + n))
                done[seq] += n
        a, b = ours.layers.counters, theirs.counters
        assert (a.written, a.read, a.copied, a.calls) == (b.written, b.read, b.copied, b.calls), settings


def test_memory_is_released_with_its_owner(cuda) -> None:
    driver = cuda._driver
    before = driver.free_bytes()
    held = cuda.memory(planned())
    assert driver.free_bytes() < before - planned().nbytes
    del held
    gc.collect()
    assert driver.free_bytes() == before
    assert driver.live == {}


def test_layers_refuse_what_does_not_fit_the_step(cuda) -> None:
    layers = cuda.layers(planned())
    x = np.zeros((2, 2, 8), np.float32)
    with pytest.raises(BadStep, match="no step was applied"):
        layers.write(0, x, x)
    layers.apply(steps(planned(), [{0: 2}])[0])
    with pytest.raises(UnknownLayer, match="layer 2 of a model with layers 0 to 1"):
        layers.write(2, x, x)
    with pytest.raises(BadArray, match="k is float32"):
        layers.write(0, x[:1], x)
    with pytest.raises(BadArray, match="q is float64"):
        layers.attend(0, np.zeros((2, 4, 8)))
    with pytest.raises(BadArray, match="not contiguous"):
        layers.write(0, x, np.zeros((2, 8, 2), np.float32).swapaxes(1, 2))


@pytest.mark.parametrize(
    ("spec", "settings", "words"),
    [
        (
            SPEC,
            dict(codec="f16/int8"),
            "no f16/int8 cells .it has f32, f16, bf16, int8, int6, int4, and pairs of bf16, ",
        ),
        (SPEC, dict(layout="panel", block_size=32), "does not have the panel layout"),
        (SPEC, dict(layout="columns", block_size=32), "does not have the columns layout"),
        (LayerSpec(4, 2, 8, 16), {}, "keys of 8 and values of 16 numbers"),
        (LayerSpec(4, 2, 264, 264), {}, "heads of 264 numbers: the cuda backend has kernels up to 256"),
        (LayerSpec(4, 2, 12, 12), {}, "heads of 12 numbers: the cuda backend has kernels for multiples of 8"),
    ],
)
def test_refusals(spec: LayerSpec, settings: dict, words: str) -> None:
    driver = RecordingDriver()
    with pytest.raises(KvarnError, match=words) as refused:
        Cuda(driver, "", True).memory(planned(spec, **settings))
    assert "\n" not in str(refused.value)
    assert "--backend cpu" in str(refused.value)
    assert driver.calls == [], "nothing was allocated"


def test_caches_that_are_too_large(cuda) -> None:
    with pytest.raises(KvarnError, match=r"more than 2\^31 cells: lower --cache-bytes"):
        CudaMemory(RecordingDriver(), planned(context=1 << 20, max_seqs=2048))
    with pytest.raises(KvarnError, match=r"more than 2\^31 entries: lower -c or -np"):
        CudaMemory(RecordingDriver(), planned(context=1 << 20, max_seqs=1 << 16, cache_bytes=1 << 30))
    with pytest.raises(OutOfMemory):
        cuda.memory(planned(context=1 << 18, max_seqs=64))
    assert cuda._driver.live == {}, "what was allocated before the failure is released"
