"""Counts with their nouns."""

import pytest

from kvarn.words import counted


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (-1, "-1 tokens"), (1024, "1,024 tokens")]
)
def test_regular(n: int, text: str) -> None:
    assert counted(n, "token") == text


def test_irregular() -> None:
    assert counted(1, "query", "queries") == "1 query"
    assert counted(21000, "query", "queries") == "21,000 queries"
