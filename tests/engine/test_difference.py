"""The same text in other tokens, and not the same text."""

import pytest

from kvarn.engine.difference import same_text


def spelled(*tokens: str) -> list[tuple[int, bytes]]:
    """Each text is a token; its id comes from the text."""
    return [(hash(token) & 0xFFFF, token.encode()) for token in tokens]


def ids(*tokens: str) -> tuple[int, ...]:
    return tuple(id for id, _ in spelled(*tokens))


@pytest.mark.parametrize(
    ("ours", "theirs", "n"),
    [
        (["\n\n", "<call>"], ["\n", "\n", "<call>"], (1, 2)),
        (["\n", "\n", "<call>"], ["\n\n", "<call>"], (2, 1)),
        (["ab", "cd", "e"], ["a", "bc", "d", "e"], (2, 3)),
        (["apple", " pie"], ["app", "le"], (1, 2)),  # all that is known of the earlier text is in ours
        (["é"], ["é"], (1, 1)),
    ],
)
def test_the_same_text(ours: list[str], theirs: list[str], n: tuple[int, int]) -> None:
    assert same_text(spelled(*ours), spelled(*theirs)) == (ids(*ours[: n[0]]), ids(*theirs[: n[1]]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([" Monday", "."], [" Tues", "day", "."]),
        (["\n\n", "Yes"], ["\n", "\n", "No"]),  # the text goes on otherwise, so the tokens are not the cause
        (["app"], ["apple"]),  # our text ends here
        (["apple", " pie"], ["app"]),  # theirs ends here: somebody typed on
        (["ab"], ["a", "c"]),
        ([], ["a"]),
        (["a"], []),
    ],
)
def test_another_text(ours: list[str], theirs: list[str]) -> None:
    assert same_text(spelled(*ours), spelled(*theirs)) is None


def test_bytes_that_are_half_a_character() -> None:
    whole, first, second = "é".encode(), "é".encode()[:1], "é".encode()[1:]
    assert same_text([(1, whole), (9, b"!")], [(2, first), (3, second), (9, b"!")]) == ((1,), (2, 3))
    assert same_text([(1, whole), (9, b"!")], [(2, first), (4, b"\xa8"), (9, b"!")]) is None
