"""Rewinding. Trimming a ring that has wrapped is where caches corrupt silently; here it says how far it can go."""

import numpy as np
import pytest
from support.harness import Driven, chunks, drive, fill_with_nan, inputs, named, oracle

from kvarn.backends.reference import Reference
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

WINDOW, CHUNK, BLOCK = 24, 10, 16


def ring(pinned: int = 0, name: str = "cyclic"):
    spec = LayerSpec(2, 1, 1, 1, window=WINDOW, pinned=pinned)
    placement = PLACEMENTS[name](GroupConfig(spec, BLOCK, 64, context=1000, max_chunk=CHUNK))
    placement.open(0)
    return placement


def advance(placement, length: int) -> None:
    while (start := placement.residency(0).length) < length:
        n = min(CHUNK, length - start)
        assert placement.reserve(0, start + n)
        named(placement, 0, range(start, start + n))
        placement.check()


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_a_ring_rewinds_exactly_where_nothing_it_needs_was_overwritten(length: int) -> None:
    placement = ring()
    size = placement.config.window_blocks
    for target in range(length + 1):
        placement = ring()
        advance(placement, length)
        high = -(-length // BLOCK) - 1
        legal = target == 0 or max(0, target - WINDOW + 1) // BLOCK >= high - size + 1
        assert placement.rewind(0, target) == (target if legal else 0)
        placement.check()


def test_rewinding_twice_does_not_forget_what_was_overwritten() -> None:
    """`high` is the highest block ever placed: a first rewind must not make a second one look safe."""
    placement = ring()
    advance(placement, 160)
    near = 150
    assert placement.rewind(0, near) == near
    far = 70
    assert placement.rewind(0, far) == 0


@pytest.mark.parametrize("pinned", [0, 20])
def test_a_ring_that_started_over_rewinds_like_a_new_one(pinned: int) -> None:
    placement = ring(pinned)
    advance(placement, 150)
    assert placement.rewind(0, 60) == 16 * -(-pinned // 16)
    advance(placement, 60)
    assert placement.rewind(0, 59) == 59
    advance(placement, 60)
    assert placement.reserve(0, 61)
    assert placement.rewind(0, 60) == 60, "to where it stands"


def test_a_forked_ring_cannot_rewind_to_what_was_not_copied() -> None:
    placement = ring()
    advance(placement, 63)  # blocks 0 and 1 are dead but not overwritten
    assert placement.intact(0, 40) == 40
    assert placement.fork(0, 1)
    assert placement.intact(1, 40) == 0
    assert placement.intact(1, 63) == 63


@pytest.mark.parametrize("name", ["cyclic", "paged"])
def test_pinned_blocks_are_always_intact(name: str) -> None:
    placement = ring(pinned=20, name=name)  # two blocks
    advance(placement, 300)
    assert placement.rewind(0, 100) == 32
    placement.check()
    advance(placement, 60)


@pytest.mark.parametrize(("strategy", "window"), [("paged", None), ("contiguous", None), ("ring", 40), ("sliding", 40)])
@pytest.mark.parametrize("target", [0, 1, 40, 57, 64, 79])
def test_what_is_computed_after_a_rewind_is_right(strategy: str, window: int | None, target: int) -> None:
    spec = LayerSpec(4, 2, 8, 8)
    config = CacheConfig([spec], 128, strategy, "f32", block_size=16, max_chunk=80, window=window)
    cache = Driven(config, Reference())
    fill_with_nan(cache)
    first, second = inputs(spec, 80, seed=0), inputs(spec, 100, seed=1)
    drive(cache, chunks(0, 80), {(0, 0): first})
    reached = cache.rewind(0, target)
    assert reached in (target, 0)
    if window is None:
        assert reached == target
    for name in "qkv":
        getattr(second, name)[:reached] = getattr(first, name)[:reached]
    rows = []
    for n in (1, 15, 1, 3):
        start = cache.length(0)
        span = slice(start, start + n)
        cache.reserve(0, span.stop)
        cache.prepare([0])
        cache.write(0, second.k[span], second.v[span])
        rows.append(cache.attend(0, second.q[span]))
        cache.commit(0, [9] * n)
        cache.check()
    expected = oracle(second, cache.plan.groups[0].config.spec, "f32")[reached : reached + 20]
    assert np.abs(np.concatenate(rows) - expected).max() < 2e-6
