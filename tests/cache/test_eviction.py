"""Eviction: blocks without a reference stay cached until their place is needed; the least recently used go first."""

import pytest
from support.pager import pager, prompt

from kvarn.errors import KvarnError


@pytest.mark.requirement(18)
def test_only_unreferenced_blocks_are_evicted_least_recent_first() -> None:
    p = pager(9)
    for seq in range(3):
        prompt(p, seq, range(1000 * seq, 1000 * seq + 64))  # 2 blocks each
    p.free(0)
    p.free(1)  # cached: 0's then 1's; live: 2's
    assert (p.n_used, p.n_cached, p.n_evicted) == (2, 4, 0)
    assert prompt(p, 3, range(100_000, 100_000 + 4 * 32)).reused == 0  # needs 4: three free, one evicted
    assert p.n_evicted == 1
    assert prompt(p, 4, range(32)).reused == 31, "the head of the oldest outlived its tail"
    assert len(p.blocks(2)) == 2
    p.free(4)
    p.open(5)
    assert p.reserve(5, 2 * 32)  # evicts the least recent: sequence 1's tail, then its head
    p.open(6)
    assert p.match(6, list(range(1000, 1065)), 64).reused == 0
    assert p.match(6, list(range(33)), 32).reused == 32, "what was used last is still there"
    assert p.match(6, list(range(2000, 2065)), 64).reused == 64, "a live sequence's blocks are never evicted"
    assert not p.reserve(6, 3 * 32), "live blocks are not taken"
    p.check()


@pytest.mark.requirement(18)
def test_watermarks_are_off_by_default() -> None:
    for marks, cached in ((None, 20), ((0.9, 0.7), 14)):
        p = pager(20, watermarks=marks)
        for seq in range(10):  # 2 blocks each: the tenth passes 0.9 of 20, and leaves 0.7 of 20
            prompt(p, seq, range(1000 * seq, 1000 * seq + 64))
            p.free(seq)
        assert p.n_cached == cached, marks
        assert p.n_evicted == 20 - cached
        p.check()


@pytest.mark.requirement(18)
@pytest.mark.parametrize("marks", [(0.5, 0.7), (1.2, 0.5), (0.5, -0.1)])
def test_watermarks_out_of_order_or_range_are_refused(marks: tuple[float, float]) -> None:
    with pytest.raises(KvarnError, match="watermarks"):
        pager(20, watermarks=marks)
