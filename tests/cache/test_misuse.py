"""Calls out of order and invalid arguments: errors with a name, and no effect."""

import threading

import numpy as np
import pytest
from support.caches import write_step
from support.harness import Driven, backend, chunks, drive, fill_with_nan, inputs

from kvarn.backends.reference import Reference
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import BadArray, BadStep, KvarnError, OutOfMemory, PastCapacity, UnknownLayer, UnknownSequence

SPEC = LayerSpec(4, 2, 8, 8)
X = inputs(SPEC, 40, seed=0)


def cache_of(strategy: str = "paged", place=None, **more) -> Driven:
    settings = dict(context=128, codec="f32", block_size=16, max_seqs=3, max_chunk=32) | more
    cache = Driven(CacheConfig([SPEC], strategy=strategy, **settings), place or Reference())
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
    cache = cache_of(strategy, backend())
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
    cache = cache_of(place=backend())
    cache.open(0)
    begin(cache, 0, 10)
    cache.commit(0, range(4))
    with pytest.raises(BadStep):
        cache.commit(0, range(4, 10))
    assert cache.fork(0, 1)
    assert np.isfinite(begin(cache, 4, 12)).all()


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


def test_a_rewind_voids_the_step() -> None:
    cache = cache_of()
    cache.open(0)
    begin(cache, 0, 5)
    cache.rewind(0, 0)
    with pytest.raises(BadStep):
        cache.advance(0, 5)


def test_a_second_step_waits_for_the_commit_of_the_first_unless_it_may_run_ahead() -> None:
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


def test_a_sequence_may_be_in_a_step_only_once() -> None:
    cache = cache_of()
    cache.open(0)
    cache.reserve(0, 5)
    with pytest.raises(BadStep, match="twice"):
        cache.prepare([0, 0])


@pytest.mark.parametrize("bad", [[2**63], [-(2**63) - 1], [1.5], [None], ["a"], "text"])
def test_tokens_that_are_not_integers_are_refused(bad) -> None:
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


def test_a_salt_that_is_not_bytes_is_refused_and_takes_no_row() -> None:
    cache = cache_of()
    for _ in range(10):
        with pytest.raises(KvarnError, match="salt"):
            cache.open(0, salt="alice")  # type: ignore[arg-type]
    for seq in range(3):
        cache.open(seq)
    cache.check()


def test_lengths_that_are_not_integers_are_refused() -> None:
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
def test_sizes_that_are_not_integers_are_refused(field: str, value: object) -> None:
    with pytest.raises(KvarnError, match=f"{field} is .*whole number"):
        CacheConfig(**(dict(layers=[SPEC], context=64) | {field: value}))


def test_contexts_beyond_32_bits_and_caches_beyond_memory_are_refused() -> None:
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
    cache = cache_of(strategy, backend())
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


def test_the_cost_of_a_rewind_does_not_depend_on_the_context() -> None:
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
def test_freeing_a_sequence_with_reserved_tokens_is_safe() -> None:
    cache = cache_of(place=backend())
    drive(cache, chunks(0, 20), {(0, 0): X})
    cache.reserve(0, 30)
    cache.free(0)
    cache.check()
    with pytest.raises(KvarnError):
        cache.prepare([0])


def misuses(cache: Driven):
    k = np.zeros((1, 2, 8), np.float32)
    wide = np.zeros((1, 2, 16), np.float32)

    def write(k=k, v=k, layer=0):
        return lambda: cache.write(layer, k, v)

    return {
        "wrong rank": (write(k[0]), BadArray),
        "wrong heads": (write(np.zeros((1, 6, 8), np.float32)), BadArray),
        "wrong dim": (write(v=np.zeros((1, 2, 4), np.float32)), BadArray),
        "wrong dtype": (write(k.astype(np.float64)), BadArray),
        "not contiguous": (write(wide[:, :, ::2]), BadArray),
        "not an array": (write([[0.0]]), BadArray),
        "wrong number of tokens": (write(np.zeros((2, 2, 8), np.float32)), BadArray),
        "zero tokens": (write(np.zeros((0, 2, 8), np.float32)), BadArray),
        "unknown layer": (write(layer=1), UnknownLayer),
        "negative layer": (write(layer=-1), UnknownLayer),
        "queries of the wrong shape": (lambda: cache.attend(0, k), BadArray),
        "past capacity": (lambda: cache.reserve(0, 65), PastCapacity),
        "past the largest chunk": (lambda: cache.reserve(1, 33), PastCapacity),
        "zero steps": (lambda: cache.reserve(0, cache.length(0)), BadStep),
        "commit of nothing": (lambda: cache.commit(0, []), BadStep),
        "commit of more than was prepared": (lambda: cache.commit(0, [1, 2, 3]), BadStep),
        "commit of what was reserved but not written": (lambda: cache.commit(1, [1]), BadStep),
        "a step of no sequence": (lambda: cache.prepare([]), BadStep),
        "a step with nothing reserved": (lambda: cache.prepare([2]), BadStep),
        "adopt in mid-sequence": (lambda: cache.adopt(0, [1, 2, 3]), BadStep),
        "unknown sequence": (lambda: cache.reserve(9, 1), UnknownSequence),
        "rewind forward": (lambda: cache.rewind(0, 60), BadStep),
    }


@pytest.mark.requirement(6)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_misuse_raises_a_named_error_and_changes_nothing(strategy: str) -> None:
    cache = cache_of(strategy, backend(), context=64)
    for seq in range(3):
        cache.open(seq)
    x = inputs(SPEC, 10, seed=0)
    write_step(cache, x.k, x.v)
    assert cache.reserve(0, 11)
    assert cache.reserve(1, 5)
    cache.prepare([0])
    before = cache.arena.copy(), cache.usage(), [cache.placements[0].blocks(seq) for seq in range(3)]
    for name, (attempt, error) in misuses(cache).items():
        with pytest.raises(error) as raised:
            attempt()
        assert "\n" not in str(raised.value), name
        assert (cache.arena == before[0]).all(), name
        after = cache.usage(), [cache.placements[0].blocks(seq) for seq in range(3)]
        assert after == before[1:], name
        cache.check()
    cache.write(0, x.k[:1], x.v[:1])  # and the step that was under way goes on
    cache.commit(0, [10])
    with pytest.raises(BadStep, match="prepare one and apply it first"):
        cache_of(strategy, backend()).write(0, x.k[:1], x.v[:1])


@pytest.mark.requirement(52)
def test_the_paged_cache_checks_its_bounds() -> None:
    cache = Driven(CacheConfig([SPEC], 64, "paged", "f32"), Reference())
    cache.open(0)
    with pytest.raises(PastCapacity):
        cache.reserve(0, 65)
    cache.reserve(0, 10)
    cache.prepare([0])
    with pytest.raises(BadArray):
        cache.write(0, np.zeros((11, 2, 8), np.float32), np.zeros((11, 2, 8), np.float32))
