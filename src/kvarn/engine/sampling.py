"""Sampling. A request's sampler is a closure. It is built once, so the loop over tokens checks no flags.

Order: logit bias, penalties, logits processors, the constraint. Then greedy sampling takes the largest
logit; otherwise temperature, top-k, top-p, min-p and a random draw follow. The random number of output token i of
sample k is a function of (seed, k, i), so batching, preemption and restarts do not change it. Ties go
to the lower id. Log-probabilities are those of the model, before all these steps. All settings of the
request must have values (`SamplingParams.with_defaults`).

Logits with a bias or a penalty are rounded to f32, and a token's weight is a whole number, exp((score -
largest score) / temperature) times UNIT. Sums of whole numbers have one result in any order, so a device
that computes the same function draws the same token (drafting.py, backends/cuda/sampler.py).
"""

import math
from collections.abc import Callable
from hashlib import blake2b
from struct import pack
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvarn.arithmetic import exp, log, total
from kvarn.arrays import Doubles, Floats
from kvarn.engine.constraint import FREE, Constraint
from kvarn.engine.params import LogitsProcessor, SamplingParams
from kvarn.errors import BadLogits, KvarnError

UNIT = 2.0**44  # the weight of the likeliest token: 2^18 of them fit an int64
WEIGHTLESS = -32.0  # exp of it, times UNIT, is rounded to 0
LARGEST = float(np.finfo(np.float32).max)


class Sampled(NamedTuple):
    token: int
    logprob: float | None  # None: the request did not ask for it
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most likely tokens, if the request asked for them


class History(NamedTuple):
    """The input of penalties: all tokens so far. The first n_prompt are the prompt."""

    tokens: list[int]
    n_prompt: int

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]


Sampler = Callable[[Floats, History, int, Constraint], Sampled]  # logits [vocabulary], history, k of the sample
Edit = Callable[[Doubles, History], None]
Report = Callable[[Floats, int], Sampled]  # a token and its log-probabilities in these logits
Value = TypeVar("Value")


def uniform(seed: int, k: int, i: int) -> float:
    """A random number in [0, 1) with 53 bits."""
    digest = blake2b(pack("<QQQ", seed & (1 << 64) - 1, k, i), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def make_sampler(params: SamplingParams, seed: int, vocab_size: int, first: int = 0) -> Sampler:
    """`first`: the number of the first sample, in an answer that goes on."""
    edits = _edits(params, vocab_size)
    choose = _greedy if params.temperature == 0 else _drawing(params, seed)
    report = make_report(params.logprobs)

    plain = params.temperature == 0 and not edits  # then the argmax needs no float64 copy

    def sample(logits: Floats, history: History, k: int, constraint: Constraint = FREE) -> Sampled:
        likeliest = likeliest_token(logits)
        if plain and constraint is FREE:
            return report(logits, likeliest)
        scores = logits.astype(np.float64)
        for edit in edits:
            edit(scores, history)
        if constraint is not FREE:
            constraint.mask(scores, history.output)
            if np.isneginf(scores.max()):
                raise KvarnError("the constraint of this request allows no token")
        return report(logits, choose(scores, first + k, history.n_output))

    return sample


def bad_logits(largest: float) -> BadLogits:
    return BadLogits(f"the model's largest logit is {largest}: its weights are damaged, fetch it again")


def likeliest_token(logits: Floats) -> int:
    """Raises BadLogits if there is no largest number."""
    likeliest = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[likeliest]):
        raise bad_logits(float(logits[likeliest]))
    return likeliest


def value(setting: Value | None) -> Value:
    assert setting is not None, "a setting is open"
    return setting


def _edits(params: SamplingParams, vocab_size: int) -> list[Edit]:
    edits: list[Edit] = []
    if params.logit_bias:
        ids = np.array(list(params.logit_bias), np.int64)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise KvarnError(f"logit_bias names a token outside the vocabulary of {vocab_size}")
        bias = np.array(list(params.logit_bias.values()), np.float64)
        edits.append(lambda scores, history: _add(scores, ids, bias))
    penalty = value(params.repetition_penalty)
    if penalty != 1:

        def repetition(scores: Doubles, history: History) -> None:
            seen = np.array(sorted(set(history.tokens)), np.int64)
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)

        edits.append(repetition)
    if params.presence_penalty or params.frequency_penalty:
        presence, frequency = params.presence_penalty, params.frequency_penalty

        def presence_and_frequency(scores: Doubles, history: History) -> None:
            ids, counts = np.unique(np.array(history.output, np.int64), return_counts=True)
            scores[ids] -= presence + frequency * counts

        edits.append(presence_and_frequency)
    if edits:
        edits.append(_round)
    return [*edits, *map(_processing, params.logits_processors)]


def _processing(process: LogitsProcessor) -> Edit:
    """Calls a caller's function. What it returns is checked, because the sampler relies on it."""
    name = getattr(process, "__name__", type(process).__name__)

    def edit(scores: Doubles, history: History) -> None:
        try:
            changed = process(history.output, scores)
        except SystemExit:
            raise KvarnError(f"the logits processor {name} called exit: raise another error there") from None
        if changed is not None:
            if np.shape(changed) != scores.shape:
                raise KvarnError(f"the logits processor {name} returned {np.shape(changed)}, not {scores.shape}")
            scores[:] = changed
        largest = scores.max()  # NaN, if there is one
        if not math.isfinite(largest):
            what = "no token is allowed" if np.isneginf(largest) else f"the largest logit is {largest}"
            raise KvarnError(f"after the logits processor {name} {what}")

    return edit


def _round(scores: Doubles, history: History) -> None:
    scores[:] = np.clip(scores, -LARGEST, LARGEST).astype(np.float32)


def _add(scores: Doubles, ids: NDArray[np.int64], bias: Doubles) -> None:
    scores[ids] += bias


def _greedy(scores: Doubles, k: int, i: int) -> int:
    return int(scores.argmax())


def _drawing(params: SamplingParams, seed: int) -> Callable[[Doubles, int, int], int]:
    temperature, top_k = value(params.temperature), value(params.top_k)
    top_p, min_p = value(params.top_p), value(params.min_p)

    def draw(scores: Doubles, k: int, i: int) -> int:
        ids = np.sort(_largest(scores, top_k)) if top_k else np.arange(len(scores))
        # The maximum is subtracted first: a quotient by a tiny temperature may overflow to -inf, never to +inf.
        with np.errstate(over="ignore"):
            kept = (scores[ids] - scores.max()) / temperature
        heavy = np.flatnonzero(kept > WEIGHTLESS)
        ids, kept = ids[heavy], kept[heavy]
        weights = np.rint(exp(kept) * UNIT).astype(np.int64)
        mass = int(weights.sum())
        allowed = int(weights[weights >= min_p * UNIT].sum()) if min_p else mass
        if top_p < 1:  # the token that crosses it stays
            reach = max(int(top_p * float(mass)), 1)
            _, sums = _heaviest(scores[ids], kept, weights, reach)
            allowed = min(allowed, int(sums[np.searchsorted(sums, reach)]))
        place = min(int(uniform(seed, k, i) * float(allowed)), allowed - 1)
        order, sums = _heaviest(scores[ids], kept, weights, place + 1)
        return int(ids[order[np.searchsorted(sums, place, side="right")]])

    return draw


def _heaviest(
    scores: Doubles, kept: Doubles, weights: NDArray[np.int64], enough: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Places of the largest scores, descending, ties by ascending id, until the sum of their weights is `enough` or
    more, and these sums. Few tokens have most of the weight, so a sort of all of them is rarely needed."""
    for least in (-3.0, -6.0, -10.0, WEIGHTLESS):
        places = np.flatnonzero(kept > least)
        if int(weights[places].sum()) >= enough:
            break
    order = places[np.argsort(-scores[places], kind="stable")]
    return order, np.cumsum(weights[order])


def _largest(scores: Doubles, k: int) -> NDArray[np.intp]:
    """Ids of the k largest scores (0: all), descending, ties by ascending id."""
    if 0 < k < len(scores):
        threshold = np.partition(scores, -k)[-k]
        above, equal = np.flatnonzero(scores > threshold), np.flatnonzero(scores == threshold)
        ids = np.sort(np.concatenate((above, equal[: k - len(above)])))
    else:
        ids = np.arange(len(scores))
    return ids[np.argsort(-scores[ids], kind="stable")]


def make_report(n: int | None) -> Report:
    """Reports the log-probability of a token and of the n most likely tokens. None: no log-probabilities."""

    def report(logits: Floats, token: int) -> Sampled:
        logprobs = log_softmax(logits)
        top = _largest(logprobs, n) if n else np.array([], np.intp)
        return Sampled(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in top))

    return _no_report if n is None else report


def _no_report(logits: Floats, token: int) -> Sampled:
    return Sampled(token, None, ())


def log_softmax(logits: Floats) -> Doubles:
    x = logits.astype(np.float64)
    shifted = x - x.max(-1, keepdims=True)
    result: Doubles = shifted - log(total(exp(shifted)))[..., None]
    return result
