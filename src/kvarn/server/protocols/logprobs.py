"""Log-probabilities as JSON, in the form that most protocols have."""

from collections.abc import Callable

from kvarn.jobs.job import TokenLogprob
from kvarn.server.schema import Json

LEAST = -9999.0  # the smallest log-probability, because JSON has no -infinity


def token_entry(entry: TokenLogprob, token_bytes: Callable[[int], bytes]) -> Json:
    """A token, its log-probability and those of the likeliest tokens."""

    def of(token: int, logprob: float) -> Json:
        raw = token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    return {**of(entry.token, entry.logprob), "top_logprobs": [of(token, logprob) for token, logprob in entry.top]}
