"""How far the logits of one cache are from those of the base, position by position.

    base = Base(logits, targets)             the base's logits of a step, and the tokens of the text after them
    track.add(base, start, other_logits)     the same step with another cache

The definitions are those of llama.cpp's `--kl-divergence`. Its file of the base's logits has 16 bits per
number and leaves out small probabilities; here nothing is rounded to fewer bits than the arithmetic has.
Everything is computed with kvarn.arithmetic, so equal logits give equal bits on every machine. The last
position of a window has no target; only its bits are compared. Only values per position are kept.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvarn.arithmetic import exp, total
from kvarn.arrays import Doubles, Floats
from kvarn.engine.sampling import bad_logits, log_softmax

SLAB = 1 << 17  # numbers that are widened to float64 at a time: they stay in the processor's cache


class Base:
    """The base's logits of one step."""

    def __init__(self, logits: Floats, targets: list[int]) -> None:
        if not np.isfinite(logits.max()):
            raise bad_logits(float(logits.max()))
        self.logits = logits  # [rows, vocabulary]
        self.targets = np.array(targets, np.int64)  # [rows], or one fewer at the end of a window
        self.logprobs = np.empty((len(targets), logits.shape[1]))
        for rows in slabs(self.logprobs):
            self.logprobs[rows] = log_softmax(logits[rows])
        self.probabilities = exp(self.logprobs)
        self.top = logits[: len(targets)].argmax(-1)

    def nll(self) -> Doubles:
        """Of the tokens of the text: negative log-likelihood, in nats."""
        return -self.logprobs[np.arange(len(self.targets)), self.targets]


def slabs(array: Doubles) -> list[slice]:
    height = max(SLAB // array.shape[1], 1)
    return [slice(start, min(start + height, len(array))) for start in range(0, len(array), height)]


def _doubles() -> "array[float]":
    return array("d")


def _integers() -> "array[int]":
    return array("i")


@dataclass(slots=True)
class Track:
    """One value per position that has a target, in the order of the text; the equal positions are only counted."""

    depth: "array[int]" = field(default_factory=_integers)  # tokens before it in its window
    nll: "array[float]" = field(default_factory=_doubles)
    nll_base: "array[float]" = field(default_factory=_doubles)
    kld: "array[float]" = field(default_factory=_doubles)
    delta_p: "array[float]" = field(default_factory=_doubles)  # of the text's token, minus that of the base
    same_top: "array[int]" = field(default_factory=_integers)  # 1: the most likely token is the base's
    equal: int = 0  # positions where every bit of the logits is that of the base

    def add(self, base: Base, start: int, logits: Floats) -> None:
        n = len(base.targets)
        self.equal += equal_rows(base.logits, logits)
        nll_base = base.nll()
        nll, kld = np.empty(n), np.empty(n)
        for rows in slabs(base.logprobs):
            nll[rows], kld[rows] = _against(base, rows, logits)
        whole = np.isfinite(logits[:n].max(-1))  # not where cells overflowed: these rows have no probabilities
        nll[~whole] = kld[~whole] = np.inf
        self.depth.extend(range(start, start + n))
        self.nll.extend(nll.tolist())
        self.nll_base.extend(nll_base.tolist())
        self.kld.extend(kld.tolist())
        self.delta_p.extend((exp(-nll) - exp(-nll_base)).tolist())
        self.same_top.extend(((logits[:n].argmax(-1) == base.top) & whole).tolist())


def equal_rows(a: Floats, b: Floats) -> int:
    """Rows with the same bits."""
    same: NDArray[np.bool_] = (a.view(np.uint32) == b.view(np.uint32)).all(-1)
    return int(np.count_nonzero(same))


def _against(base: Base, rows: slice, logits: Floats) -> tuple[Doubles, Doubles]:
    """Negative log-likelihood and Kullback-Leibler divergence of these rows."""
    with np.errstate(invalid="ignore"):  # infinity - infinity
        logprobs = log_softmax(logits[rows])
        terms = base.probabilities[rows] * (base.logprobs[rows] - logprobs)
    terms[base.probabilities[rows] == 0] = 0
    targets = base.targets[rows]
    nll = -logprobs[np.arange(len(targets)), targets]
    return nll, np.maximum(total(terms), 0)  # it is never negative, and its rounding should not be either
