"""Verbs out of order, and arguments that are not what they should be: typed errors, nothing half done."""

import threading

import numpy as np
import pytest
from support.harness import Driven, backend, chunks, drive, fill_with_nan, inputs, named

from kvarn.backends.reference import Reference
from kvarn.cache.placement import GroupConfig, Reason, ReuseLimit
from kvarn.cache.placements.paged import Paged
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import BadStep, KvarnError, OutOfMemory, UnknownSequence

SPEC = LayerSpec(4, 2, 8, 8)
X = inputs(SPEC, 40, seed=0)


def cache_of(strategy: str = "paged", **more) -> Driven:
    settings = dict(context=128, codec="f32", block_size=16, max_seqs=3, max_chunk=32) | more
    cache = Driven(CacheConfig([SPEC], strategy=strategy, **settings), backend())
    fill_with_nan(cache)
    return cache


def begin(cache: Driven, start: int, stop: int, seq: int = 0) -> np.ndarray:
    cache.reserve(seq, stop)
    cache.prepare([seq])
    cache.write(0, X.k[start:stop], X.v[start:stop])
    return cache.attend(0, X.q[start:stop])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fork_waits_for_the_end_of_the_step(strategy: str) -> None:
    cache = cache_of(strategy)
    cache.open(0)
    begin(cache, 0, 5)
    cache.commit(0, range(5))
    begin(cache, 5, 10)
    with pytest.raises(BadStep, match="in the middle of a step"):
        cache.fork(0, 1)
    cache.commit(0, range(5, 10))
    assert cache.fork(0, 1)
    assert np.isfinite(begin(cache, 10, 11)).all()


@pytest.mark.usefixtures("backend")
def test_a_commit_of_a_part_ends_the_step() -> None:
    cache = cache_of()
    cache.open(0)
    begin(cache, 0, 10)
    cache.commit(0, range(4))
    with pytest.raises(BadStep):
        cache.commit(0, range(4, 10))
    assert cache.fork(0, 1)
    assert np.isfinite(begin(cache, 4, 12)).all()


@pytest.mark.usefixtures("reference")
def test_a_dropped_step_takes_its_sequences_and_no_others() -> None:
    cache = cache_of()
    for seq in (0, 1):
        cache.open(seq)
    begin(cache, 0, 5, seq=1)
    cache.commit(1, range(5))
    cache.reserve(0, 32)
    assert cache.drop(cache.book.prepare([0])) == [0]
    cache.check()
    with pytest.raises(UnknownSequence):
        cache.commit(0, range(32))
    cache.open(0)
    assert cache.adopt(0, list(range(33))).reused == 5, "what was committed"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("leaves", ["with the step", "before it"])
def test_a_dropped_copy_is_not_reused(leaves: str) -> None:
    """Sequence 1 gets a copy of the block that it shares with sequence 0, which then goes back to the start. The copy
    is lost with a step, and nothing else holds these five tokens."""
    cache = cache_of()
    cache.open(0)
    begin(cache, 0, 5)
    cache.commit(0, range(5))
    cache.fork(0, 1)
    cache.reserve(1, 6)
    cache.rewind(0, 0)
    if leaves == "before it":
        cache.free(1)
        cache.reserve(0, 3)
    step = cache.book.prepare([0 if leaves == "before it" else 1])
    assert [move.slots for move in step.groups[0].moves] == [5]
    assert len(cache.drop(step)) == 1
    cache.check()
    cache.open(2)
    assert cache.adopt(2, list(range(20))).reused == 0


@pytest.mark.usefixtures("reference")
def test_a_rewind_voids_the_step() -> None:
    cache = cache_of()
    cache.open(0)
    begin(cache, 0, 5)
    cache.rewind(0, 0)
    with pytest.raises(BadStep):
        cache.advance(0, 5)


@pytest.mark.usefixtures("reference")
def test_a_second_step_waits_for_the_names_of_the_first_unless_it_may_run_ahead() -> None:
    for ahead in (0, 2):
        cache = cache_of(ahead=ahead)
        cache.open(0)
        for length in range(1, ahead + 2):
            assert cache.reserve(0, length)
            cache.prepare([0])
            cache.advance(0, 1)
        with pytest.raises(BadStep, match="not committed"):
            cache.reserve(0, ahead + 2)
        cache.book.commit(0, [7])
        assert cache.reserve(0, ahead + 2)
        assert cache.length(0) == 1
        cache.check()


@pytest.mark.usefixtures("reference")
def test_a_sequence_stands_once_in_a_step() -> None:
    cache = cache_of()
    cache.open(0)
    cache.reserve(0, 5)
    with pytest.raises(BadStep, match="twice"):
        cache.prepare([0, 0])


@pytest.mark.parametrize("bad", [[2**63], [-(2**63) - 1], [1.5], [None], ["a"], "text"])
def test_tokens_that_are_no_ids(bad) -> None:
    local = LayerSpec(4, 2, 8, 8, window=24)
    cache = Driven(CacheConfig([local, SPEC], 112, "paged", "f32", block_size=16, max_chunk=32), Reference())
    cache.open(0)
    with pytest.raises(BadStep, match="tokens must be integers"):
        cache.adopt(0, bad)
    cache.reserve(0, 20)
    cache.launched(cache.prepare([0]))
    with pytest.raises(BadStep, match="tokens must be integers"):
        cache.book.commit(0, [*range(16), *bad] if isinstance(bad, list) else bad)
    cache.check()
    assert cache.length(0) == 0
    cache.book.commit(0, np.arange(20))  # NumPy's integers are integers
    assert cache.free(0) == 4
    cache.check()


@pytest.mark.usefixtures("reference")
def test_a_salt_that_is_no_bytes_takes_no_row() -> None:
    cache = cache_of()
    for _ in range(10):
        with pytest.raises(KvarnError, match="salt"):
            cache.open(0, salt="alice")  # type: ignore[arg-type]
    for seq in range(3):
        cache.open(seq)
    cache.check()


@pytest.mark.usefixtures("reference")
def test_lengths_that_are_no_integers() -> None:
    cache = cache_of("contiguous")
    cache.open(0)
    begin(cache, 0, 10)
    cache.commit(0, range(10))
    for verb in (cache.reserve, cache.rewind):
        with pytest.raises(BadStep, match="whole number"):
            verb(0, 5.5)
    cache.check()
    assert cache.length(0) == 10


@pytest.mark.parametrize("field", ["context", "max_seqs", "max_chunk", "block_size", "window", "pinned", "cache_bytes"])
@pytest.mark.parametrize("value", [64.0, "16", True])
def test_sizes_that_are_no_integers(field: str, value: object) -> None:
    with pytest.raises(KvarnError, match=f"{field} is .*whole number"):
        CacheConfig(**(dict(layers=[SPEC], context=64) | {field: value}))


def test_more_tokens_than_positions_and_more_bytes_than_memory() -> None:
    with pytest.raises(KvarnError, match="positions are 32 bits"):
        CacheConfig([SPEC], context=1 << 33)
    huge = CacheConfig([LayerSpec(64, 64, 256, 256)] * 100, (1 << 31) - 1, "contiguous", "f32", max_seqs=64)
    with pytest.raises(OutOfMemory, match="this machine does not give them"):
        Driven(huge, Reference())


def test_a_budget_is_not_exceeded_by_alignment() -> None:
    for spec, codec, budget in ((LayerSpec(3, 3, 5, 5), "bf16", 19200), (LayerSpec(1, 1, 1, 1), "int8", 4800)):
        made = plan(CacheConfig([spec] * 4, 48, "paged", codec, block_size=16, cache_bytes=budget * 2))
        assert made.nbytes <= budget * 2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_freed_by_another_thread_leaves_the_running_step_whole(strategy: str) -> None:
    """The tables are read-only while kernels run: freeing changes bookkeeping, not the step under way."""
    cache = cache_of(strategy)
    cache.open(0)
    cache.open(1)
    cache.reserve(0, 20)
    cache.reserve(1, 20)
    cache.prepare([0, 1])
    k, v, q = (np.concatenate([x[:20], x[:20]]) for x in (X.k, X.v, X.q))
    cache.write(0, k, v)
    thread = threading.Thread(target=cache.free, args=(0,))
    thread.start()
    thread.join()
    output = cache.attend(0, q)
    assert (output[:20] == output[20:]).all()
    assert output.any()
    cache.commit(1, range(20))
    cache.check()


@pytest.mark.usefixtures("reference")
def test_adopt_says_not_sharing_for_any_prompt() -> None:
    for strategy in ("contiguous", "ring"):
        for prompt in ([], [1], [1, 2]):
            cache = cache_of(strategy)
            cache.open(0)
            assert cache.adopt(0, prompt) == (0, ReuseLimit(Reason.NOT_SHARING, 0))


def test_a_group_that_forgot_everything_is_out_of_window_and_not_unshared() -> None:
    """The local group remembers little; that the global one still has the text shows that it was there."""
    layers = [LayerSpec(2, 1, 1, 1, window=64), LayerSpec(2, 1, 1, 1)]
    cache = Driven(CacheConfig(layers, 16_384, "paged", "f32", block_size=16, max_seqs=2), Reference())
    first, second = list(range(16_384)), list(range(10**6, 10**6 + 16_384))
    for seq, text in enumerate((first, second)):
        cache.open(seq)
        for start in range(0, len(text), 512):
            cache.reserve(seq, start + 512)
            cache.prepare([seq])
            cache.commit(seq, text[start : start + 512])
        cache.free(seq)
    cache.open(2)
    assert cache.adopt(2, first) == (0, ReuseLimit(Reason.OUT_OF_WINDOW, 16_383))


def test_explanations_repeat() -> None:
    answers = set()
    keep = []  # so that addresses differ from round to round
    for _ in range(50):
        p = Paged(GroupConfig(LayerSpec(2, 1, 1, 1), 16, 64, context=512, max_chunk=512))
        keep.append(p)
        for seq in range(6):
            p.open(seq)
            p.reserve(seq, 5)
            named(p, seq, [1, 2, 3, 100 + seq, 7])
        p.open(9)
        answers.add(p.match(9, [1, 2, 3, 9, 9, 9], 5).limit)
    assert len(answers) == 1


def test_a_match_over_evicted_blocks_looks_at_each_block_once() -> None:
    """Counted, not timed: blocks looked at grow with the text, not with its square."""
    looks = []

    class Counting(list):
        def __getitem__(self, index):
            looks.append(index)
            return super().__getitem__(index)

    for n in (256, 1024):
        p = Paged(GroupConfig(LayerSpec(2, 1, 1, 1), 16, n, context=n * 16, max_chunk=n * 16))
        text = list(range(n * 16))
        p.open(0)
        p.reserve(0, n * 16)
        named(p, 0, text)
        p.free(0)
        p.open(1)
        p.reserve(1, n * 8)  # evicts half, tail first
        p.open(2)
        path = Counting(p.tree.walk(p.residency(2).node, text))
        looks.clear()
        assert p._resident(path, n * 16 - 1) == n * 8
        assert len(looks) <= n + 1


@pytest.mark.usefixtures("reference")
def test_what_is_left_of_a_rewind_does_not_depend_on_the_context() -> None:
    """Entries rewritten in the table after a rewind by a few tokens: a window's worth at most."""
    for strategy in ("ring", "sinks", "paged", "contiguous"):
        cache = cache_of(strategy, context=4096, max_chunk=512, window=40 if strategy in ("ring", "sinks") else None)
        cache.open(0)
        while (start := cache.length(0)) < 4000:
            n = min(512, 4000 - start)
            cache.reserve(0, start + n)
            cache.prepare([0])
            cache.commit(0, range(n))
        assert cache.rewind(0, 3990) == 3990
        r = cache.placements[0].residency(0)
        assert len(r.blocks) - min(r.changed, len(r.blocks)) <= 40


@pytest.mark.usefixtures("backend")
def test_unfinished_work_is_harmless() -> None:
    cache = cache_of()
    drive(cache, chunks(0, 20), {(0, 0): X})
    cache.reserve(0, 30)
    cache.free(0)
    cache.check()
    with pytest.raises(KvarnError):
        cache.prepare([0])
