"""Cells with a tail: a query reads its own 32 positions in int8. Bits depend on tokens and positions, and on nothing
else: not on chunks, rewinds, forks or shared prefixes, nor on steps that were not committed. Storage is NaN first."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.harness import (
    Driven,
    Inputs,
    assert_near,
    backend,
    bits,
    chunks,
    drive,
    expect,
    fill_with_nan,
    inputs,
    two_backends,
)

from kvarn.cache.adoption import Reason, ReuseLimit
from kvarn.cache.codec import TILE
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.errors import BadStep, KvarnError

SPEC = LayerSpec(6, 2, 48, 48)
CODECS = ("int4", "int6", "int8/int4", "int6/bf16")
N = 230


def cache_of(strategy: str, codec: str, window: int | None = None, **settings) -> Driven:
    made = dict(max_chunk=N, max_seqs=3, window=window) | settings
    cache = Driven(CacheConfig([SPEC], 2 * N, strategy, codec, **made), backend())
    fill_with_nan(cache)
    return cache


def spec_of(cache: Driven) -> LayerSpec:
    return cache.plan.groups[0].config.spec


class Text:
    """Tokens with their rows: what a token stands for depends on those before it, as in a model."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        rows, seen = [], 7
        for position, token in enumerate(self.tokens):
            seen = hash((seen, token))
            rows.append(inputs(SPEC, 1, seed=abs(hash((seen, position))) % 2**31))
        self.x = Inputs(*(np.concatenate([getattr(row, name) for row in rows]) for name in "qkv"))


def compute(cache: Driven, seq: int, text: Text, end: int, chunk: int = N) -> np.ndarray:
    """The rows from where the sequence stands up to `end`."""
    found = []
    while (start := cache.length(seq)) < end:
        stop = min(start + chunk, end)
        assert cache.reserve(seq, stop)
        cache.prepare([seq])
        found.append(rows(cache, text, start, stop))
        cache.commit(seq, text.tokens[start:stop])
        cache.check()
    return np.concatenate(found)


def rows(cache: Driven, text: Text, start: int, stop: int) -> np.ndarray:
    cache.write(0, text.x.k[start:stop], text.x.v[start:stop])
    return cache.attend(0, text.x.q[start:stop])


def alone(text: Text, codec: str, window: int | None = None) -> np.ndarray:
    """Every row of the text, computed in one piece."""
    cache = cache_of("contiguous", codec, window)
    cache.open(0)
    return compute(cache, 0, text, len(text.tokens))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("codec", CODECS)
def test_bits_do_not_depend_on_chunks(codec: str, window: int | None) -> None:
    cache = cache_of("contiguous", codec, window)
    x = inputs(SPEC, N, seed=1)
    whole = drive(cache, chunks(0, N), {(0, 0): x})[0, 0]
    assert_near(whole, expect(x, spec_of(cache), codec))
    for sizes in (
        (31, 1, 1, 31, 33, 64, 65, 4),
        (1,) * 70 + (160,),
        (5, 100, 125),
        (200, *(1,) * 30),
        (33,) * 6 + (32,),
    ):
        for strategy in ("paged", "sliding" if window else "head-major"):
            again = drive(cache_of(strategy, codec, window), chunks(0, *sizes), {(0, 0): x})[0, 0]
            assert (bits(again) == bits(whole)).all(), (strategy, sizes)


@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", ["int4", "int8/int6"])
@pytest.mark.parametrize(("strategy", "window"), [("paged", None), ("contiguous", None), ("ring", 40), ("sliding", 40)])
def test_what_is_computed_after_a_rewind_is_right(strategy: str, window: int | None, codec: str) -> None:
    """A rewind into the last two tiles is exact, and one before them lands on the begin of a tile."""
    first = Text(range(150))
    for target in (149, 129, 128, 127, 97, 96, 95, 70, 64, 33, 5, 0):
        cache = cache_of(strategy, codec, window, max_chunk=70)
        cache.open(0)
        compute(cache, 0, first, 150, chunk=70)
        reached = cache.rewind(0, target)
        exact = target if target >= 96 or target % TILE == 0 else target - target % TILE
        assert reached == exact or (window and reached == 0)
        second = Text([*first.tokens[:reached], *range(1000, 1060)])
        ours = compute(cache, 0, second, reached + 60, chunk=23)
        assert (bits(ours) == bits(alone(second, codec, window)[reached:])).all(), target


@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_shared_prefix_is_reused_in_whole_tiles(block_size: int) -> None:
    cache = cache_of("paged", "int4", block_size=block_size)
    first = Text(range(150))
    cache.open(0)
    compute(cache, 0, first, 150, chunk=40)
    for shared in (150, 128, 127, 100, 97, 96, 40, 31, 3):
        second = Text([*first.tokens[:shared], *range(2000, 2030)])
        cache.open(1)
        reused, limit = cache.adopt(1, second.tokens)
        assert reused == min(shared, 149) // TILE * TILE
        assert limit.reason is (Reason.TILE if shared == 150 else Reason.DIFFERS)
        assert limit.at == shared
        ours = compute(cache, 1, second, len(second.tokens))
        assert (bits(ours) == bits(alone(second, "int4")[reused:])).all(), shared
        cache.free(1)
    cache.open(1)
    assert cache.adopt(1, first.tokens[:129]) == (128, ReuseLimit(Reason.END, 128))
    assert cache.usage().prefix_misses == {Reason.DIFFERS: 8}, "a tile is no miss"


@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("strategy", "codec"), [("paged", "int4"), ("contiguous", "int6"), ("sliding", "int8/int4")])
def test_a_step_that_was_not_committed_leaves_no_trace(strategy: str, codec: str) -> None:
    """A step is run and not advanced over, or only in part. Then its tokens are others."""
    window = 40 if strategy == "sliding" else None
    wrong = Text(range(5000, 5300))
    for start, written, kept in (
        (40, 20, 0),
        (40, 20, 7),
        (40, 60, 30),
        (60, 4, 3),
        (95, 2, 1),
        (31, 1, 0),
        (40, 150, 0),
    ):
        cache = cache_of(strategy, codec, window)
        text = Text([*range(start), *wrong.tokens[start : start + kept], *range(9000, 9040)])
        cache.open(0)
        compute(cache, 0, text, start)
        assert cache.reserve(0, start + written)
        cache.prepare([0])
        mixed = Text([*text.tokens[: start + kept], *wrong.tokens[start + kept : start + written]])
        rows(cache, mixed, start, start + written)
        if kept:
            cache.commit(0, text.tokens[start : start + kept])
        else:
            cache.rewind(0, start)
        begun = cache.length(0)
        assert begun == start + kept or begun == start // TILE * TILE
        ours = compute(cache, 0, text, len(text.tokens), chunk=9)
        assert (bits(ours) == bits(alone(text, codec, window)[begun:])).all(), (start, written, kept)


@pytest.mark.usefixtures("reference")
def test_a_tail_that_a_lost_step_overwrote_is_not_read() -> None:
    cache, text = cache_of("paged", "int4"), Text(range(200))
    cache.open(0)
    compute(cache, 0, text, 40)
    assert cache.reserve(0, 180)
    cache.prepare([0])
    rows(cache, text, 40, 180)
    cache.commit(0, text.tokens[40:50])  # 130 tokens were written for nothing, over the tile of these
    assert cache.reserve(0, 51)
    with pytest.raises(BadStep, match="overwritten the last tokens of the tail: rewind"):
        cache.prepare([0])
    assert cache.rewind(0, 50) == 32
    ours = compute(cache, 0, text, 200, chunk=50)
    assert (bits(ours) == bits(alone(text, "int4")[32:])).all()


@pytest.mark.usefixtures("reference")
def test_a_child_of_a_fork_begins_with_whole_tiles() -> None:
    for strategy, window in (("paged", None), ("contiguous", None), ("sliding", 40), ("ring", 40)):
        cache = cache_of(strategy, "int4", window)
        for length in (20, 64, 100):
            text = Text(range(length))
            cache.open(0)
            compute(cache, 0, text, length, chunk=30)
            assert cache.fork(0, 1)
            assert cache.length(1) == length // TILE * TILE
            child = Text([*text.tokens, *range(700, 740)])
            assert (bits(compute(cache, 1, child, length + 40)[-40:]) == bits(alone(child, "int4", window)[-40:])).all()
            parent = Text([*text.tokens, *range(800, 840)])
            assert (bits(compute(cache, 0, parent, length + 40, 7)) == bits(alone(parent, "int4", window)[-40:])).all()
            cache.free(0)
            cache.free(1)


@pytest.mark.usefixtures("reference")
def test_small_blocks_are_refused_in_one_line() -> None:
    with pytest.raises(
        KvarnError, match=r"^block size 16: int8/int4 cells are made 32 tokens at a time; use 32 or more$"
    ):
        cache_of("paged", "int8/int4", block_size=16)
