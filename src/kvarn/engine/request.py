"""Requests and their samples, in token ids. Non-goals: text, HTTP.

The known tokens of a sample are the prompt and the sampled tokens. The computed tokens are those whose
keys and values are in the cache. A step computes more of the known tokens. Prefill, decode, a prefix
hit and recomputation after a preemption need no separate states.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from kvarn.cache.placement import Adoption
from kvarn.engine.constraint import FREE, Constraint
from kvarn.errors import KvarnError

if TYPE_CHECKING:
    from kvarn.engine.sampling import Sampler


_INTEGERS = ("max_tokens", "top_k", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue. Temperature 0 is greedy; 0 for top_k, 1 for top_p and 0 for min_p switch those filters off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over the prompt and the output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a random seed per request
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives to report with each token; None: no log-probabilities
    n: int = 1

    def __post_init__(self) -> None:
        def ensure(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise KvarnError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in _INTEGERS:
            ensure(isinstance(getattr(self, name), Integral), name, "an integer")
        for name in ("seed", "logprobs"):
            ensure(isinstance(getattr(self, name), Integral | None), name, "an integer or None")
        for name in _NUMBERS:
            ensure(isinstance(getattr(self, name), Real), name, "a number")
        bias, stops = self.logit_bias, self.stop_tokens
        ensure(isinstance(bias, Mapping), "logit_bias", "a dictionary of token ids and numbers")
        ensure(all(isinstance(each, Integral) for each in bias), "logit_bias", "a dictionary of token ids and numbers")
        ensure(all(isinstance(each, Real) for each in bias.values()), "logit_bias", "finite; -100 forbids a token")
        for name in ("stop", "stop_tokens"):
            given = getattr(self, name)
            ensure(isinstance(given, Collection) and not isinstance(given, str | bytes), name, "a list")
        ensure(all(isinstance(each, Integral) for each in stops), "stop_tokens", "a list of token ids")
        ensure(self.max_tokens >= 1, "max_tokens", "at least 1")
        ensure(0 <= self.temperature < math.inf, "temperature", "0 (greedy) or more")
        ensure(self.top_k >= 0, "top_k", "0 (off) or more")
        ensure(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        ensure(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        ensure(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100; 1 is off")
        ensure(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", "finite; -100 forbids a token")
        ensure(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        ensure(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        ensure(self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "seed", "a 64-bit integer")
        ensure(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", "between 0 and 100")
        ensure(1 <= self.n <= 128, "n", "between 1 and 128")
        ensure(all(isinstance(s, str) and s for s in self.stop), "stop", "strings that are not empty")


def with_settings(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """`params`, or the defaults, with these settings changed."""
    if params is not None and not isinstance(params, SamplingParams):
        raise KvarnError(f"params is {type(params).__name__}: give SamplingParams, or settings by name (max_tokens=3)")
    known = [each.name for each in fields(SamplingParams)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise KvarnError(f"there is no setting {name!r}" + (f": did you mean {near[0]}?" if near else ""))
    return replace(params or SamplingParams(), **settings)


@dataclass(slots=True, eq=False)
class Sample:
    """One continuation of a request's prompt."""

    id: int  # the sequence in the cache
    request: "Request"
    index: int  # which of the request's n samples
    tokens: list[int]  # known: prompt and output
    computed: int = 0
    furthest: int = 0  # the largest `computed` so far: below it, a step recomputes after a preemption
    last_token_at: float | None = None
    finish_reason: str | None = None  # stop, length, cancelled, error
    constraint: Constraint = FREE

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def n_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class Timing:
    """Times of a request, in seconds of time.perf_counter."""

    queued_at: float
    started_at: float | None = None  # first admitted
    first_token_at: float | None = None
    finished_at: float | None = None
    prefill_seconds: float = 0.0  # its share of the steps that computed its prompt for the first time
    recomputed_seconds: float = 0.0  # its share of the steps that recomputed tokens after preemptions
    recomputed_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    timing: Timing
    salt: bytes = b""
    conversation: Hashable = None  # requests of one conversation continue one parked sequence
    priority: int = 0  # how often eviction skips the blocks that it leaves in the cache
    samples: list[Sample] = field(default_factory=list)
    sampler: "Sampler" = field(init=False)
    adoption: Adoption | None = None  # what the prompt reused at its first admission
    preemptions: int = 0
    error: BaseException | None = None  # the error that ended it, if any

    @property
    def done(self) -> bool:
        return all(sample.finish_reason for sample in self.samples)
