"""The fastest variant of a step, found by trials: with steps whose times are known."""

import pytest

from kvarn import native


class Steps:
    """Steps whose time is known for each variant; they vary by a tenth."""

    def __init__(self, ns: list[int], longest: int = 5_000_000) -> None:
        self.fastest, self.ns, self.n = native.Fastest(len(ns), 32, longest), ns, 0

    def run(self, n: int, tokens: int = 1, keys: int = 100) -> list[int]:
        found = []
        for i in range(self.n, self.n + n):
            found.append(self.fastest.next(tokens, keys))
            self.fastest.took(int(self.ns[found[-1]] * (1 + (i % 5 - 2) / 20)))
        self.n += n
        return found


@pytest.mark.parametrize(
    ("ns", "best"),
    [
        ([1000, 1200, 1600, 2000, 3000], 0),
        ([2000, 1500, 1200, 1000, 1300], 3),
        ([2000, 1500, 1200, 1000, 800], 4),
        ([1000, 1000, 1000, 1000, 1000], 0),
        ([1000, 900], 1),
    ],
)
def test_trials_find_the_fastest_variant(ns: list[int], best: int) -> None:
    steps = Steps(ns)
    steps.run(500)
    found = steps.run(20_000)
    assert found.count(best) > 0.99 * len(found)  # and few steps are spent on trials
    assert steps.run(1, 1, 300) == [best]  # a new size begins with what was best for the last one


def test_trials_follow_the_machine() -> None:
    steps = Steps([1000, 1100, 1400, 1600, 2000])
    assert steps.run(20_000)[-1] == 0
    steps.ns = [3000, 2200, 1400, 1600, 2000]
    assert steps.run(20_000).count(2) > 10_000


def test_long_steps_have_no_trials() -> None:
    assert set(Steps([6_000_000, 1]).run(5000)) == {0}
    assert set(Steps([1000]).run(5000)) == {0}


def test_a_pool_of_few_threads_always_uses_all() -> None:
    assert [native.thread_counts(n) for n in (1, 2, 3)] == [[1], [2], [3]]
    assert native.thread_counts(4) == [4, 3, 2]
    assert native.thread_counts(16) == [16, 12, 8, 6, 4]
