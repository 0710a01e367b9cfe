"""Sampling settings under llama.cpp's names."""

from typing import Any

from kvarn.engine.params import SamplingParams
from kvarn.server.schema import Json

RANDOM_SEED = 2**32 - 1
# What llama.cpp has and kvarn has not, with the values that switch it off.
OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 0,
    "dry_sequence_breakers": [],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "post_sampling_probs": False,
    "speculative": False,
    "lora": [],
}
SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # in the order in which they are applied


def generation_settings(params: SamplingParams, context: int, stream: bool, max_tokens: int | None) -> Json:
    """`max_tokens`: as asked for; None: as many as fit."""
    limit = -1 if max_tokens is None else max_tokens
    return {
        "n_ctx": context,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "n_probs": params.logprobs or 0,
        "samplers": SAMPLERS,
        **OFF,
    }
