"""llama.cpp's objects `timings` (how fast a prompt was computed and an answer was written) and `prompt_progress`."""

from collections.abc import Sequence
from typing import NamedTuple

from kvarn.engine.explain import Explanation
from kvarn.engine.request import Sample
from kvarn.server.schema import Json


class Timings(NamedTuple):
    cached: int  # prompt tokens
    computed: int  # prompt tokens
    prompt_ms: float
    n: int  # tokens of the answer
    ms: float  # from its first token to its last

    def as_json(self) -> Json:
        """The rate of an answer is that of the tokens after the first, which the prompt's time includes."""
        return {
            "cache_n": self.cached,
            "prompt_n": self.computed,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_per_token_ms": _ratio(self.prompt_ms, self.computed),
            "prompt_per_second": _ratio(1000 * self.computed, self.prompt_ms),
            "predicted_n": self.n,
            "predicted_ms": round(self.ms, 3),
            "predicted_per_token_ms": _ratio(self.ms, self.n - 1),
            "predicted_per_second": _ratio(1000 * (self.n - 1), self.ms),
        }


class Progress(NamedTuple):
    """How much of a prompt is computed."""

    total: int  # prompt tokens
    cached: int
    processed: int  # with the cached ones
    ms: float  # since the request was first admitted
    prompt_ms: float

    def as_json(self) -> Json:
        return {"total": self.total, "cache": self.cached, "processed": self.processed, "time_ms": round(self.ms)}

    @property
    def timings(self) -> Timings:
        return Timings(self.cached, self.processed - self.cached, self.prompt_ms, 0, 0.0)


def _ratio(share: float, whole: float) -> float:
    return round(share / whole, 3) if whole > 0 else 0.0


def timings_so_far(sample: Sample) -> Timings:
    """Of a sample that has a token."""
    request, timing = sample.request, sample.request.timing
    reused = request.adoption.reused if request.adoption else 0
    first, last = timing.first_token_at, sample.last_token_at
    ms = 0.0 if first is None or last is None else 1000 * max(last - first, 0.0)
    return Timings(reused, len(request.prompt) - reused, 1000 * timing.prefill_seconds, sample.n_output, ms)


def timings_at_end(explanations: Sequence[Explanation], n_tokens: int) -> Timings:
    """Of all prompts of a call together; `n_tokens`: of all answers."""
    return Timings(
        sum(each.reused for each in explanations),
        sum(each.computed for each in explanations),
        sum(each.prefill_ms for each in explanations),
        n_tokens,
        sum((each.total_ms or 0.0) - (each.first_token_ms or each.total_ms or 0.0) for each in explanations),
    )
