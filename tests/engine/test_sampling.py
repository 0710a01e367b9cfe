"""Sampling: filters, penalties, stateless randomness, ties."""

from collections import Counter
from itertools import accumulate, product

import numpy as np
import pytest

from kvarn.arithmetic import exp
from kvarn.engine import sampling
from kvarn.engine.params import TEXT_DEFAULTS, SamplingParams
from kvarn.engine.sampling import History, log_softmax, uniform
from kvarn.errors import BadLogits, KvarnError

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5], np.float32)
EMPTY = History([], 0)


def make_sampler(params: SamplingParams, seed: int, vocab_size: int) -> sampling.Sampler:
    return sampling.make_sampler(params.with_defaults(TEXT_DEFAULTS), seed, vocab_size)


def draw(logits=LOGITS, history=EMPTY, k=0, seed=1, **params):
    return make_sampler(SamplingParams(**params), seed, len(logits))(np.asarray(logits, np.float32), history, k)


def possible(logits=LOGITS, **params) -> set[int]:
    sampler = make_sampler(SamplingParams(temperature=1.0, **params), 3, len(logits))
    return {sampler(logits, History([0] * i, 0), 0).token for i in range(600)}


def test_greedy_takes_the_largest_and_ties_go_to_the_lower_id() -> None:
    assert draw().token == 1


def test_top_k_prefers_the_lower_id_among_equals() -> None:
    assert possible(top_k=1) == {1}
    assert possible(top_k=2) == {1, 3}
    assert possible(top_k=3) == {1, 2, 3}
    assert possible(np.zeros(6, np.float32), top_k=4) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_crosses() -> None:
    p = np.exp(log_softmax(LOGITS))
    assert possible(top_p=float(p[1]) * 0.9) == {1}
    assert possible(top_p=float(p[1]) * 1.1) == {1, 3}
    assert possible(top_p=1.0) == set(range(6))


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert possible(min_p=0.9) == {1, 3}
    assert possible(min_p=np.exp(-1.01)) == {1, 2, 3}


def test_temperature_sharpens_and_frequencies_follow_the_probabilities() -> None:
    sampler = make_sampler(SamplingParams(temperature=2.0), 11, 6)
    counts = Counter(sampler(LOGITS, History([0] * i, 0), 0).token for i in range(20_000))
    expected = np.exp(log_softmax(LOGITS / 2))
    for token in range(6):
        assert counts[token] / 20_000 == pytest.approx(expected[token], abs=0.012)
    assert possible(np.array([0, 5, 0], np.float32) * 100) == {1}


def drawn_by_definition(logits: np.ndarray, params: SamplingParams, u: float) -> int:
    """All tokens that are allowed, sorted; then the prefixes of top-k, top-p and min-p; then the draw."""
    order = sorted(np.flatnonzero(logits > -np.inf).tolist(), key=lambda token: (-logits[token], token))
    order = order[: params.top_k or None]
    shifted = (logits[order].astype(np.float64) - float(logits[order[0]])) / params.temperature
    weights = [int(weight) for weight in np.rint(exp(shifted) * sampling.UNIT)]
    sums = list(accumulate(weights))
    if params.top_p < 1:
        reach = max(int(params.top_p * float(sums[-1])), 1)
        sums = sums[: next(n for n, mass in enumerate(sums, 1) if mass >= reach)]
    sums = sums[: sum(weight >= params.min_p * sampling.UNIT for weight in weights)]
    place = min(int(u * float(sums[-1])), sums[-1] - 1)
    return order[next(n for n, mass in enumerate(sums) if mass > place)]


@pytest.mark.parametrize("spread", [0.01, 2.0, 12.0])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 30.0])
def test_a_draw_is_the_one_of_the_definition(spread: float, temperature: float) -> None:
    random = np.random.default_rng(int(spread * 100 + temperature * 1000))
    for i, (top_k, top_p, min_p) in enumerate(
        product((0, 1, 5, 200), (1.0, 0.999, 0.95, 0.3, 1e-9), (0.0, 1e-12, 0.05))
    ):
        logits = (random.standard_normal(300) * spread).astype(np.float32)
        logits[random.integers(0, 300, 60)] = logits[:60]  # ties
        forbidden = random.random(300) < (0, 0.5, 0.99)[i % 3]
        forbidden[7] = False
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logits_processors=[lambda tokens, scores, forbidden=forbidden: scores.__setitem__(forbidden, -np.inf)],
        ).with_defaults(TEXT_DEFAULTS)
        masked = np.where(forbidden, -np.inf, logits).astype(np.float32)
        for n in range(20):
            drawn = sampling.make_sampler(params, 5, 300)(logits, History([0] * n, 0), i).token
            assert drawn == drawn_by_definition(masked, params, uniform(5, i, n)), (top_k, top_p, min_p, n)


def test_randomness_is_a_pure_function_of_seed_sample_and_index() -> None:
    assert uniform(1, 0, 0) == uniform(1, 0, 0)
    values = {uniform(s, k, i) for s in range(5) for k in range(5) for i in range(5)}
    assert len(values) == 125
    assert all(0 <= value < 1 for value in values)
    assert np.mean([uniform(7, 0, i) for i in range(4000)]) == pytest.approx(0.5, abs=0.02)
    assert uniform(2026, 3, 17) == 0.6715676111954901, "a draw must not change from release to release"


def test_penalties() -> None:
    history = History([1, 3, 3], 1)
    assert draw(history=history, repetition_penalty=2.0).token == 2, "1 in the prompt and 3 in the output are halved"
    assert draw(history=History([1], 1), presence_penalty=2.0).token == 1, "presence looks at the output only"
    assert draw(history=History([1], 0), presence_penalty=0.5).token == 3
    assert draw(history=History([1, 1, 3], 0), frequency_penalty=0.6).token == 3
    assert draw(history=History([4], 1), repetition_penalty=3.0, logprobs=0).token == 1


def test_logit_bias_and_its_bounds() -> None:
    assert draw(logit_bias={4: 100.0}).token == 4
    assert draw(logit_bias={1: -100.0}).token == 3
    for bad in (-1, 6):
        with pytest.raises(KvarnError, match="outside the vocabulary of 6"):
            draw(logit_bias={bad: 1.0})


def test_logprobs_are_the_models_own() -> None:
    sampled = draw(logit_bias={4: 100.0}, logprobs=2)
    exact = log_softmax(LOGITS)
    assert sampled.token == 4
    assert sampled.logprob == pytest.approx(exact[4])
    assert [token for token, _ in sampled.top] == [1, 3]
    assert sum(np.exp(exact)) == pytest.approx(1)
    assert draw().logprob is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("seed", 1 << 65),
        ("logprobs", 101),
        ("n", 0),
        ("stop", [""]),
    ],
)
def test_invalid_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(KvarnError, match=f"^{field} is .*; it must be "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("wrong", ["1", 1.5, None, [1], b"1"])
@pytest.mark.parametrize(
    "field", ["max_tokens", "top_k", "n", "seed", "logprobs", "stop", "stop_token_ids", "logit_bias"]
)
def test_values_of_a_wrong_type_are_refused_by_name(field: str, wrong: object) -> None:
    right = dict.fromkeys(("max_tokens", "top_k", "seed", "logprobs")) | {"stop": "1", "stop_token_ids": [1]}
    if (field, wrong) in right.items():
        SamplingParams(**{field: wrong})
        return
    with pytest.raises(KvarnError, match=f"^{field} is .*; it must be "):
        SamplingParams(**{field: wrong})


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_numbers_of_a_wrong_type_are_refused_by_name(field: str) -> None:
    for wrong in ("1", [1], 1j):
        with pytest.raises(KvarnError, match=f"^{field} is .*; it must be a number"):
            SamplingParams(**{field: wrong})
    SamplingParams(**{field: np.float32(1)}, max_tokens=np.int64(3), seed=np.uint32(1))


def test_stop_may_be_a_single_string() -> None:
    assert SamplingParams(stop="###").stop == ("###",)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_draws_the_likeliest_token(temperature: float, filters: dict) -> None:
    """A quotient that overflows must not turn the order of the tokens around. Token 3 ties with token 1."""
    sampler = make_sampler(SamplingParams(temperature=temperature, **filters), 3, 6)
    for logits in (LOGITS, -LOGITS - 5, LOGITS * 1e30):
        likeliest = set(np.flatnonzero(logits == logits.max()).tolist())
        assert {sampler(logits, History([0] * i, 0), 0).token for i in range(100)} <= likeliest


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(repetition_penalty=5e-324), "repetition_penalty is 5e-324; it must be between 0.01 and 100"),
        (dict(repetition_penalty=float("nan")), "repetition_penalty is nan"),
        (dict(repetition_penalty=1e300), "repetition_penalty is 1e[+]300"),
        (dict(logit_bias={5: float("inf")}), "logit_bias is .*; it must be finite"),
        (dict(logit_bias={5: float("nan")}), "logit_bias is .*; it must be finite"),
        (dict(temperature=float("nan")), "temperature is nan"),
    ],
)
def test_numbers_that_are_not_finite_or_absurd_are_refused(params: dict, message: str) -> None:
    with pytest.raises(KvarnError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"presence_penalty": 1.0}])
def test_logits_that_are_not_finite_are_the_models_fault(wrong: float, params: dict) -> None:
    logits = LOGITS.copy()
    logits[4] = wrong
    with pytest.raises(BadLogits, match="its weights are damaged"):
        draw(logits, **params)
    assert not isinstance(BadLogits(), KvarnError), "a server reports it as its own error, not as the caller's"
