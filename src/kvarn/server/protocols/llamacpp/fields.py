"""The fields of llama.cpp's own endpoints."""

from typing import Any

from kvarn.server.chat_fields import STRUCTURES
from kvarn.server.request_fields import CHAT, EXTENSIONS, HARMLESS, MIXED, NO_OPS, SHARED, Fields
from kvarn.server.schema import Schema

TEXT: Schema = {"type": "string"}
NAMES: Schema = {"type": "array", "items": {"type": "string", "maxLength": 256}, "maxItems": 256}
BIAS: Schema = {
    "anyOf": [
        {"type": "object", "maxProperties": 4096},
        {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"anyOf": [{"type": "number"}, TEXT, {"type": "boolean"}]},
                "minItems": 2,
                "maxItems": 2,
            },
            "maxItems": 4096,
        },
    ],
    "description": "[[token id or text, bias], ...] or {token id or text: bias}; a bias of false forbids the token",
}
LIMIT: Schema = {
    "type": "integer",
    "minimum": -2,
    "maximum": 2**31 - 1,
    "description": "-1 and -2: as many as fit; 0: the prompt is computed into the cache, and there is no answer",
}
SAMPLING: dict[str, Schema] = {
    **{name: SHARED[name] for name in ("model", "temperature", "top_k", "top_p", "min_p", "presence_penalty")},
    **{name: SHARED[name] for name in ("frequency_penalty", "seed", "stop", "ignore_eos", "stream", "request_id")},
    **{name: SHARED[name] for name in ("cache_salt", "cache_priority")},
    "repeat_penalty": SHARED["repetition_penalty"],
    "n_predict": LIMIT,
    "max_tokens": LIMIT,
    "n_cmpl": SHARED["n"],
    "n": SHARED["n"],
    "logit_bias": BIAS,
    "n_probs": {"type": "integer", "minimum": 0, "maximum": 20},
    "grammar": STRUCTURES["grammar"],
    "json_schema": STRUCTURES["json_schema"],
    "return_tokens": {"type": "boolean"},
    **{name: EXTENSIONS[name] for name in ("timings_per_token", "return_progress")},
    "response_fields": {**NAMES, "description": "only these fields of the answer; a/b is the field b of a"},
}
# They choose a slot, an order or a limit of time that kvarn does not have. The answer names them.
TOLD = (
    *("id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse", "n_indent", "repeat_last_n", "samplers"),
    *("min_keep", "t_max_prompt_ms", "t_max_predict_ms", "sse_ping_interval", "backend_sampling"),
)
# Settings of samplers that are off: NO_OPS has the field that would switch each of them on.
OFF = (
    *("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("xtc_threshold", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
)
UNCHANGED: dict[str, list[Any]] = NO_OPS | {
    "lora": [[]],
    "adaptive_target": [-1],
    "repeat_last_n": [-1],
    "n_discard": [0],
    "n_cache_reuse": [0],
    "n_indent": [0],
    "t_max_prompt_ms": [0],
    "sse_ping_interval": [-1],
    "backend_sampling": [False],
}
COMPLETION = Fields({"prompt": MIXED, **SAMPLING}, ("prompt",), (*HARMLESS, *OFF), TOLD, UNCHANGED)
EXTRA: Schema = {
    "type": "object",
    "properties": {"filename": TEXT, "text": TEXT, "time": {"type": "integer"}},
    "required": ["filename", "text"],
    "additionalProperties": False,
}
INFILL = Fields(
    {
        "input_prefix": TEXT,
        "input_suffix": TEXT,
        "input_extra": {"type": "array", "items": EXTRA, "maxItems": 256},
        "prompt": {**TEXT, "description": "follows input_prefix"},
        **SAMPLING,
    },
    ("input_prefix", "input_suffix"),
    (*HARMLESS, *OFF),
    TOLD,
    UNCHANGED,
)
TEMPLATE = Fields(
    {
        **{name: CHAT[name] for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "model")},
        **{name: CHAT[name] for name in ("chat_template_kwargs", "reasoning_effort", "reasoning_format")},
        "continue_final_message": CHAT["continue_final_message"],
        "add_generation_prompt": {"type": "boolean", "description": "false: without the beginning of the answer"},
    },
    ("messages",),
)
