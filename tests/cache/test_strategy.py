"""Which strategy `auto` stands for: decided once, from the context and the number of sequences."""

import pytest

from kvarn.cache.strategy import resolve


@pytest.mark.requirement(30)
@pytest.mark.parametrize(
    ("context", "max_seqs", "expected"),
    [(2047, 1, "contiguous"), (2048, 1, "paged"), (2047, 2, "paged"), (16, 1, "contiguous"), (131_072, 64, "paged")],
)
def test_auto_is_contiguous_for_one_short_sequence_else_paged(context: int, max_seqs: int, expected: str) -> None:
    assert resolve("auto", context, max_seqs).name == expected
    assert resolve("ring", context, max_seqs).name == "ring"
