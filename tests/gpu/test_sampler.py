"""Sampling on the device against sampling on the host: always the same token, in any batch."""

from dataclasses import replace

import numpy as np
import pytest
from gpu.support.sampling import HISTORY, KINDS, SETTINGS, Tried, logits_of, params

from kvarn.backends.base import Draw
from kvarn.engine.drafting import make_drafter
from kvarn.engine.params import SamplingParams
from kvarn.engine.sampling import History, make_sampler


def expected(logits: np.ndarray, settings: SamplingParams, seed: int) -> int:
    return make_sampler(settings, seed, len(logits))(logits, HISTORY, 0).token


@pytest.mark.requirement(32)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [901, 8200])
def test_tokens_are_those_of_the_host(driver, kind: str, n: int) -> None:
    """Every setting, in two batches of rows."""
    rows = [logits_of(kind, n, seed) for seed in range(2)]
    tried = Tried(driver, rows, most=len(SETTINGS) * len(rows))
    asked = [(row, params(**settings)) for settings in SETTINGS for row in (0, 1)]
    for seed in range(3 if n < 1000 else 1):
        draws = [make_drafter(given, seed)(row, HISTORY, 0) for row, given in asked]
        for edited in (False, True):  # a row has one set of edits
            chosen = [at for at, draw in enumerate(draws) if (draw.edits is not None) == edited]
            groups = [[at] for at in chosen] if edited else [chosen]
            for group in groups:
                found = tried([draws[at] for at in group])
                assert found == [expected(rows[asked[at][0]], asked[at][1], seed) for at in group]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_tiny_vocabularies(driver, n: int) -> None:
    rows = [logits_of(kind, n, 1) for kind in ("normal", "ties", "flat")]
    tried = Tried(driver, rows, most=64)
    given = [params(), params(temperature=1.0), params(temperature=1.0, top_k=2, top_p=0.7), params(temperature=5.0)]
    for seed in range(4):
        draws = [make_drafter(each, seed)(row, History([], 0), 0) for row in range(3) for each in given]
        want = [make_sampler(each, seed, n)(rows[row], History([], 0), 0).token for row in range(3) for each in given]
        assert tried(draws) == want


def test_many_draws_of_one_row(driver) -> None:
    """A row's samples differ in their uniform numbers. Frequencies are those of the host because tokens are."""
    row = logits_of("ties", 300, 4)
    tried = Tried(driver, [row], most=300)
    given = params(temperature=1.5, top_p=0.95, repetition_penalty=1.1)
    history = History([1, 2, 3, 4], 2)
    draft, sample = make_drafter(given, 8), make_sampler(given, 8, len(row))
    found = tried([draft(0, history, k) for k in range(300)])
    assert found == [sample(row, history, k).token for k in range(300)]
    assert len(set(found)) > 50


@pytest.mark.parametrize(("value", "code"), [(np.nan, -1), (np.inf, -2), (-np.inf, -3)])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}, {"logit_bias": {3: 5.0}}])
def test_rows_without_a_largest_number(driver, value: float, code: int, settings: dict) -> None:
    """The other row of the batch is as always."""
    good, bad = logits_of("normal", 5000, 1), logits_of("normal", 5000, 2)
    if code == -3:
        bad[:] = value
    bad[4321] = value
    given = params(**settings)
    draws = [make_drafter(given, 3)(row, HISTORY, 0) for row in (0, 1)]
    assert Tried(driver, [bad, good])(draws) == [code, expected(good, given, 3)]


def test_a_draw_does_not_depend_on_its_batch(driver) -> None:
    rows = [logits_of(kind, 5000, 5) for kind in ("normal", "ties", "near", "flat")]
    tried = Tried(driver, rows, most=16)
    given = [params(temperature=t, top_p=p, top_k=k) for t, p, k in ((0, 1, 0), (0.8, 0.9, 0), (1.2, 0.7, 50))]
    draws = [make_drafter(each, row)(row, HISTORY, 0) for row in range(4) for each in given]
    together = tried(draws)
    assert [tried([draw])[0] for draw in draws] == together
    assert tried(draws[::-1]) == together[::-1]


def test_what_is_sent_and_what_comes_back(driver) -> None:
    """Greedy draws of the same rows send nothing the second time, and four bytes each come back."""
    tried = Tried(driver, [logits_of("normal", 5000, seed) for seed in range(3)])
    greedy = [Draw(row) for row in range(3)]
    tried(greedy)
    before = len(driver.calls)
    tried(greedy)
    calls = driver.calls[before:]
    assert [call.name for call in calls if call.verb == "launch"] == ["peak", "choose"]
    assert [call.verb for call in calls if call.verb in ("send", "download", "synchronize")] == []
    assert [call.args[1] for call in calls if call.verb == "receive"] == [12]
    assert [call.args for call in calls if call.verb == "wait"] == [(1,)]
    for i in range(3):
        before = len(driver.calls)
        tried([draw._replace(temperature=1.0, uniform=i / 4) for draw in greedy])
        assert sum(call.verb == "send" for call in driver.calls[before:]) == 1


def test_more_bytes_than_before(driver) -> None:
    """A long history makes the inbox grow."""
    row = logits_of("normal", 8000, 1)
    tried = Tried(driver, [row])
    given = params(repetition_penalty=1.5, temperature=1.0, top_k=20)
    for length in (3, 7999):
        history = History(list(range(length)), 1)
        found = tried([make_drafter(given, 2)(0, history, 0)])
        assert found == [make_sampler(given, 2, 8000)(row, history, 0).token]


def test_drafts_are_pure(driver) -> None:
    given = replace(params(temperature=1.0, logit_bias={5: 1.0, 2: -1.0}, presence_penalty=0.5), seed=3)
    draw = make_drafter(given, 3)(0, HISTORY, 1)
    assert draw.edits is not None
    assert draw.edits.ids.tolist() == [2, 5, 7, 299]
    assert draw.edits.counts.tolist() == [1, 1, 2, 1]
    assert draw.edits.biases.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert make_drafter(given, 3)(0, HISTORY, 2).uniform != draw.uniform
