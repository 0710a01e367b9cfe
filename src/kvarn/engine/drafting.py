"""Sampling on a device: what sampling.py computes from a row and a request, as numbers for a backend.

A device has no logits processors, constraints and log-probabilities. Such rows come to the host. Only the row's own
request decides it, never its batch, and both draw the same token.
"""

from typing import Protocol

import numpy as np

from kvarn.backends.base import Draw, Edits
from kvarn.engine.params import SamplingParams
from kvarn.engine.sampling import History, uniform, value


class Drafter(Protocol):
    def __call__(self, row: int, history: History, k: int, ahead: int = 0) -> Draw:
        """The next draw of sample k. `ahead`: tokens after the history that are not known yet."""


def host_only(params: SamplingParams) -> str | None:
    """The setting for which a device cannot sample, if there is one."""
    if params.logits_processors:
        return "logits_processors"
    return None if params.logprobs is None else "logprobs"


def runs_ahead(params: SamplingParams) -> bool:
    """Whether a draw needs no token before it: then it can be launched when they are not known yet."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return host_only(params) is None and not penalties


def draws_alike(params: SamplingParams) -> bool:
    """Whether all draws of a sample are equal."""
    return runs_ahead(params) and params.temperature == 0


def make_drafter(params: SamplingParams, seed: int, first: int = 0) -> Drafter:
    """What `make_sampler` does, as numbers for a device."""
    repetition = value(params.repetition_penalty)
    penalties = bool(params.presence_penalty or params.frequency_penalty)
    bias = sorted(params.logit_bias.items())
    bias_ids, biases = np.array([t for t, _ in bias], np.int64), np.array([b for _, b in bias], np.float64)
    temperature, limits = value(params.temperature), (value(params.top_p), value(params.min_p))
    top_k = value(params.top_k)
    penalized = (repetition, params.presence_penalty, params.frequency_penalty)

    def edits(history: History) -> Edits:
        known = history.tokens if repetition != 1 else history.output if penalties else []
        seen, which = np.unique(np.array(known, np.int64), return_inverse=True)
        counts = np.bincount(which[len(known) - history.n_output :], minlength=len(seen)) if len(seen) else seen
        ids = np.union1d(bias_ids, seen)
        found = Edits(ids, np.full(len(ids), -1), np.zeros(len(ids)))
        found.counts[np.searchsorted(ids, seen)] = counts
        found.biases[np.searchsorted(ids, bias_ids)] = biases
        return found

    def draft(row: int, history: History, k: int, ahead: int = 0) -> Draw:
        changed = edits(history) if bias or repetition != 1 or penalties else None
        place = uniform(seed, first + k, history.n_output + ahead) if temperature > 0 else 0.0
        return Draw(row, temperature, top_k, *limits, place, *penalized, changed)

    return draft
