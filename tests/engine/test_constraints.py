"""Constraints: token masks that follow what each sample has said so far."""

from collections.abc import Sequence

import numpy as np
import pytest
from support import tiny

from kvarn.arrays import Doubles
from kvarn.engine.params import SamplingParams


class Alternating:
    """Only `allowed`, then only what is not."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = np.zeros(tiny.VOCAB, bool)
        self.allowed[allowed] = True
        self.accepted: list[int] = []

    def mask(self, scores: Doubles, output: Sequence[int]) -> None:
        scores[self.allowed if len(output) % 2 else ~self.allowed] = -np.inf

    def complete(self, output: Sequence[int]) -> bool:
        self.accepted = list(output)
        return False


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "top_p": 0.9}, {"frequency_penalty": 1.0, "n": 3}])
def test_a_constraint_masks_each_sample_by_its_own_output(params: dict) -> None:
    engine, allowed = tiny.engine_of(max_seqs=2, cache_bytes=None), [3, 5, 8]
    made: dict[int, Alternating] = {}

    def constrain(k: int) -> Alternating:
        return made.setdefault(k, Alternating(allowed))

    settings = SamplingParams(max_tokens=9, seed=1, **params)
    bound = engine.add([1, 2, 3], settings, constrain=constrain)
    free = engine.add([1, 2, 3], settings)
    tiny.finish(engine)
    for sample in bound.samples:
        assert [token in allowed for token in sample.output] == [i % 2 == 0 for i in range(9)]
        assert made[sample.index].accepted == sample.output
    alone = tiny.engine_of(max_seqs=2)
    again = alone.add([1, 2, 3], settings)
    tiny.finish(alone)
    assert [s.output for s in again.samples] == [s.output for s in free.samples], "others are not masked"


def test_a_constraint_that_allows_nothing_fails_its_request_only() -> None:
    engine = tiny.engine_of()
    bound = engine.add([1, 2, 3], SamplingParams(max_tokens=5), constrain=lambda k: Alternating([]))
    free = engine.add([4, 5], SamplingParams(max_tokens=5))
    tiny.finish(engine)
    assert (bound.samples[0].finish_reason, free.samples[0].finish_reason) == ("error", "length")
    assert "allows no token" in str(bound.error)
