"""Counts with their nouns, and sizes of files."""

import pytest

from kvarn.words import counted, file_size, one_of


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (-1, "-1 tokens"), (1024, "1,024 tokens")]
)
def test_regular(n: int, text: str) -> None:
    assert counted(n, "token") == text


def test_irregular() -> None:
    assert counted(1, "query", "queries") == "1 query"
    assert counted(21000, "query", "queries") == "21,000 queries"


@pytest.mark.parametrize(
    ("n", "text"),
    [
        *[(1, "1 byte"), (999, "999 bytes"), (1500, "1.5 kB"), (98_362_432, "98 MB"), (4_683_073_536, "4.7 GB")],
        *[(9_949_999, "9.9 MB"), (9_960_000, "10 MB"), (999_499_999, "999 MB"), (999_950_000, "1.0 GB")],
        *[(1000, "1.0 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")],
    ],
)
def test_sizes_of_files(n: int, text: str) -> None:
    assert file_size(n) == text


def test_choices() -> None:
    assert [one_of(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a or b", "a, b or c"]
