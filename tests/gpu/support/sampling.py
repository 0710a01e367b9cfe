"""Rows of logits of every kind and settings of every kind, sampled on a device. It needs neither Triton nor pytest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.support.launching import Board
from numpy.typing import NDArray

from kvarn.backends.base import Draw
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.sampler import Sampler
from kvarn.engine.params import TEXT_DEFAULTS, SamplingParams
from kvarn.engine.sampling import History

Row = NDArray[np.float32]
KINDS = ("normal", "ties", "flat", "masked", "near", "peaked", "huge")  # of rows of logits
SPARE = 799  # numbers behind a row
HISTORY = History([3, 3, 1, 5, 7, 7, 2, 299], 3)
SETTINGS: list[dict[str, Any]] = [
    dict(),
    dict(repetition_penalty=1.3),
    dict(presence_penalty=0.7, frequency_penalty=-0.4, logit_bias={0: 2.0, 7: -1.5, 6: 1e30}),
    dict(temperature=1.0),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=1.3, top_k=5),
    dict(temperature=2.0, min_p=0.05),
    dict(temperature=0.9, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
    dict(temperature=1e-300),
    dict(temperature=30.0, top_p=0.999),
    dict(temperature=1.0, top_p=1e-30),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, logit_bias={1: -1e30}),
]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**settings).with_defaults(TEXT_DEFAULTS)


def logits_of(kind: str, n: int, seed: int) -> Row:
    random = np.random.default_rng([seed, n])
    x = (3 * random.standard_normal(n)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "flat":
        x = np.zeros(n, np.float32)
        x[::3] = -0.0
    elif kind == "masked":
        x[random.permutation(n)[: n // 2]] = -np.inf
    elif kind == "near":  # all in one bucket, and most scores differ in their last bits
        x = (10 + 1e-4 * x).astype(np.float32)
    elif kind == "peaked":
        x[n // 2] = 60
    elif kind == "huge":
        x = (x * 1e37).astype(np.float32)
    return x


class Tried:
    """A sampler on a device with rows of logits. What is behind a row is NaN."""

    def __init__(self, driver: Device, rows: Sequence[Row], most: int = 8) -> None:
        self.n = len(rows[0])
        self.rows = np.full((len(rows), self.n + SPARE), np.nan, np.float32)
        self.rows[:, : self.n] = rows
        self.board, self.sampler = Board(driver), Sampler(driver, self.n + SPARE, most)
        self.address = self.board.put(self.rows)

    def __call__(self, draws: Sequence[Draw]) -> list[int]:
        self.board.driver.upload(self.address, self.rows)  # edits have changed them
        self.sampler.begin(1)
        self.sampler.launch(0, self.address, 0, draws, self.n)
        return self.sampler.receive([len(draws)])()
