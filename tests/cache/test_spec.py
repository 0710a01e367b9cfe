"""What a query may see, drawn. The masks here are written out, so that nothing checks itself."""

import itertools

import numpy as np
import pytest

from kvarn.cache.spec import LayerSpec, groups


def drawn(spec: LayerSpec, n: int) -> list[str]:
    pos = np.arange(n)
    return ["".join(".x"[int(seen)] for seen in row) for row in spec.visible(pos[:, None], pos)]


def test_causal() -> None:
    assert drawn(LayerSpec(1, 1, 1, 1), 4) == [
        "x...",
        "xx..",
        "xxx.",
        "xxxx",
    ]


def test_a_window_of_three_sees_itself_and_two_before() -> None:
    assert drawn(LayerSpec(1, 1, 1, 1, window=3), 6) == [
        "x.....",
        "xx....",
        "xxx...",
        ".xxx..",
        "..xxx.",
        "...xxx",
    ]


def test_pinned_tokens_stay_visible_outside_the_window() -> None:
    assert drawn(LayerSpec(1, 1, 1, 1, window=2, pinned=2), 6) == [
        "x.....",
        "xx....",
        "xxx...",
        "xxxx..",
        "xx.xx.",
        "xx..xx",
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16])
@pytest.mark.parametrize("pinned", [0, 1, 3, 9])
def test_dead_means_that_no_later_query_sees_any_of_it(window: int | None, pinned: int) -> None:
    spec = LayerSpec(1, 1, 1, 1, window=window, pinned=pinned)
    for length in range(30):
        for first in range(0, 32, 4):
            seen = any(spec.visible(q, k) for q in range(length, 60) for k in range(first, first + 4))
            assert spec.dead(first, first + 3, length) == (not seen)


def test_the_smaller_window_and_the_larger_pin_rule() -> None:
    spec = LayerSpec(4, 2, 8, 8, window=100, pinned=2)
    assert spec.narrowed(None, 0) == spec
    assert spec.narrowed(50, 4) == LayerSpec(4, 2, 8, 8, window=50, pinned=4)
    assert spec.narrowed(200, 0).window == 100
    assert LayerSpec(4, 2, 8, 8).narrowed(7, 0).window == 7


def test_layers_of_equal_spec_are_one_group() -> None:
    a, b = LayerSpec(4, 1, 8, 8, window=4), LayerSpec(4, 1, 8, 8)
    assert groups([a, a, b, a, b]) == [(a, [0, 1, 3]), (b, [2, 4])]


def test_what_a_chunk_sees_in_closed_form() -> None:
    """Counted one by one: every key that some query of the chunk may see."""
    for window, pinned in itertools.product((None, 1, 3, 7), (0, 2, 5)):
        spec = LayerSpec(1, 1, 8, 8, window, pinned)
        for first, n in itertools.product(range(12), range(1, 5)):
            keys, queries = range(first + n), range(first, first + n)
            seen = sum(any(spec.visible(q, k) for q in queries) for k in keys)
            assert spec.seen(first, first + n) == seen, (window, pinned, first, n)
