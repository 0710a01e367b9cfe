"""What would fit instead: compared with trying every setting."""

from dataclasses import replace

import pytest

from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.forecast.room import Option, Room

SPEC = LayerSpec(4, 2, 64, 64)
BESIDE = 10_000_000  # bytes of weights and everything else
MOST = 2048  # the context that the model was trained for
ASKED = CacheConfig([SPEC] * 4, 1024, "paged", "bf16", max_seqs=4)


def total(config: CacheConfig) -> int:
    return BESIDE + plan(config).nbytes


def room(budget: int) -> Room:
    return Room(budget, total, MOST)


def flags(options: list[Option], asked: CacheConfig = ASKED) -> list[str]:
    return [" ".join(option.changes(asked)) for option in options]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.55, 0.8, 0.99, 1.0, 1.7, 5.0])
def test_every_option_fits_and_nothing_larger_does(share: float) -> None:
    budget = BESIDE + int(share * (total(ASKED) - BESIDE))
    options = room(budget).options(ASKED)
    assert options
    for option in options:
        assert option.total == total(option.config) <= budget
        new = option.config
        if new.strategy == ASKED.strategy and new.context not in (ASKED.context, MOST):
            assert total(replace(new, context=new.context + 32)) > budget
        if new.max_seqs not in (ASKED.max_seqs, 1):
            assert total(replace(new, max_seqs=new.max_seqs + 1)) > budget
    assert len(set(flags(options))) == len(options)


def test_the_cheapest_change_comes_first() -> None:
    cells = total(ASKED) - BESIDE
    assert flags(room(BESIDE + cells // 2).options(ASKED))[0] == "-np 2", "no answer changes"
    alone = replace(ASKED, max_seqs=1)
    cells //= 4
    tight = room(BESIDE + int(cells * 0.6)).options(alone)
    assert flags(tight, alone)[0] == "--cache-type int8", "before a shorter context"
    tighter = room(BESIDE + int(cells * 0.4)).options(alone)
    assert flags(tighter, alone)[:2] == ["--cache-type int4", f"-c {tighter[1].config.context}"]
    tightest = room(BESIDE + int(cells * 0.1)).options(alone)
    assert flags(tightest, alone)[0] == f"-c {tightest[0].config.context}"


def test_what_else_would_fit() -> None:
    cells = total(ASKED) - BESIDE
    first, second, third = room(BESIDE + int(1.5 * cells)).options(ASKED)
    assert (first.config.context, second.config.max_seqs) == (1536, 6)
    assert flags([third]) == [f"-c {MOST} --cache-type int8"]
    assert flags(room(BESIDE + 100 * cells).options(ASKED)) == [f"-c {MOST}", "-np 400"]


def test_sinks_where_only_a_window_fits() -> None:
    asked = replace(ASKED, context=MOST, max_seqs=1)
    cells = plan(asked).nbytes
    found = Room(BESIDE + cells // 8, total, MOST).options(asked)
    assert all(option.config.context < MOST for option in found if option.config.strategy == "paged")


def test_nothing_fits() -> None:
    assert room(BESIDE).options(ASKED) == []
    assert room(0).options(ASKED) == []
