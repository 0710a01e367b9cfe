"""The fields of the requests and their schemas, for checking requests and for the OpenAPI document.

A field that is in no table is refused. So is a field of `NO_OPS` whose value is not one of those listed. A field of
`IGNORED` is accepted without effect, and the answer says so.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvarn.server.chat_fields import MARKUP, MESSAGE, STRUCTURES
from kvarn.server.schema import Schema

STOP: Schema = {"type": "string", "maxLength": 1024, "description": "an empty text stops nothing"}
TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
IDS: Schema = {"type": "array", "items": TOKEN, "minItems": 1}
FLAG: Schema = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}

SHARED: dict[str, Schema] = {
    "model": {"type": "string", "maxLength": 1024},
    "max_tokens": {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
            {"type": "integer", "enum": [-1], "description": "as many as fit"},
        ]
    },
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1, "description": "0 and -1 are off"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": 4096,
        "description": "token id -> added to its logit",
    },
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "description": "-1: a random one"},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stop": {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": 16}]},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 1024},
    "ignore_eos": {"type": "boolean"},
    "stream": {"type": "boolean"},
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": FLAG,
            "continuous_usage_stats": {**FLAG, "description": "usage in every chunk"},
            "include_obfuscation": {"enum": [False, None]},
        },
        "additionalProperties": False,
    },
    "request_id": {
        "type": "string",
        "minLength": 1,
        "maxLength": 128,
        "description": "id of the request, if the header X-Request-Id is not given: printable ASCII",
    },
    "cache_salt": {
        "type": "string",
        "minLength": 1,
        "maxLength": 256,
        "description": "share prefixes only with requests of the same key and the same salt",
    },
    "cache_priority": {
        "type": "integer",
        "minimum": 0,
        "maximum": 3,
        "description": "how often eviction skips the blocks that this request leaves in the cache",
    },
    "prompt_cache_retention": {
        "type": "string",
        "maxLength": 32,
        "description": "in_memory or 24h: raises cache_priority, if that is not given",
    },
    "prompt_cache_options": {
        "type": "object",
        "properties": {
            "ttl": {"anyOf": [{"type": "string", "maxLength": 32}, {"type": "null"}]},
            "comparison_response_id": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]},
        },
        "maxProperties": 16,
        "description": "ttl raises cache_priority; comparison_response_id: say what changed since that answer. Other "
        "fields are accepted, have no effect and are reported",
    },
}
OPTIONS = ("ttl", "comparison_response_id")  # those of prompt_cache_options that have an effect

EXTENSIONS: dict[str, Schema] = {  # of chats and completions
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 20, "description": "vLLM's; not in a stream"},
    "return_token_ids": {"type": "boolean", "description": "vLLM's: ids of the prompt and of the answer"},
    "timings_per_token": {"type": "boolean", "description": "llama.cpp's: timings in every chunk"},
    "return_progress": {
        "type": "boolean",
        "description": "llama.cpp's: a stream tells how much of the prompt is computed",
    },
    "verbose": {
        "type": "boolean",
        "description": "llama.cpp's: the answer has the text of the prompt; not in a stream",
    },
}

CHAT: dict[str, Schema] = {
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4096},
    **SHARED,
    **EXTENSIONS,
    **STRUCTURES,
    **MARKUP,
    "max_completion_tokens": SHARED["max_tokens"],
    "logprobs": {"type": "boolean"},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}

COMPLETION: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [{"type": "string"}, TOKEN, IDS]}, "minItems": 1, "maxItems": 2**17},
        ]
    },
    **SHARED,
    **EXTENSIONS,
    **STRUCTURES,
    "suffix": {"type": "string", "description": "the answer belongs between prompt and suffix; some models can"},
    "echo": {"type": "boolean", "description": "the answer begins with the prompt; logprobs are of both"},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}

PIECES: Schema = {"type": "array", "items": {"anyOf": [{"type": "string"}, TOKEN]}, "minItems": 1, "maxItems": 2**17}
PROMPT_OBJECT: Schema = {
    "type": "object",
    "properties": {"prompt_string": {"type": "string"}},
    "required": ["prompt_string"],
    "additionalProperties": False,
}
MIXED: Schema = {  # prompts as llama.cpp takes them
    "anyOf": [
        {"type": "string"},
        PROMPT_OBJECT,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, TOKEN, PIECES, PROMPT_OBJECT]},
            "minItems": 1,
            "maxItems": 2**17,
        },
    ]
}

TOKENIZE: dict[str, Schema] = {
    "prompt": {"type": "string"},
    "content": {"type": "string", "description": "llama.cpp's name of prompt"},
    "add_special": {"type": "boolean", "description": "of content: a BOS token, if the model has one (default: false)"},
    "parse_special": {"type": "boolean", "description": "of content: recognize control tokens (default: true)"},
    "with_pieces": {"type": "boolean", "description": "of content: each token with its text"},
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "continue_final_message": CHAT["continue_final_message"],
    "add_generation_prompt": CHAT["add_generation_prompt"],
    "model": SHARED["model"],
    "add_special_tokens": {"type": "boolean", "description": "a BOS token where the model has one (default: true)"},
}
DETOKENIZE: dict[str, Schema] = {
    "tokens": {"type": "array", "items": TOKEN, "maxItems": 2**20},
    "model": SHARED["model"],
}

# Fields that an endpoint does not have, and the values that have no effect.
NO_OPS: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "service_tier": ["auto", "default"],
    "verbosity": ["medium"],
    "reasoning_effort": ["none"],
    "moderation": [],
    "audio": [],
    # vLLM's
    "add_generation_prompt": [True],
    "bad_words": [[]],
    "chat_template_kwargs": [{}],
    "continue_final_message": [False],
    "documents": [[]],
    "include_reasoning": [True],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "min_tokens": [0],
    "mm_processor_kwargs": [{}],
    "priority": [0],
    "return_token_strs": [False],
    "return_tokens_as_token_ids": [False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "use_beam_search": [False],
    "vllm_xargs": [{}],
    # llama.cpp's, also in LM Studio
    "cache_prompt": [True],
    "dry_multiplier": [0],
    "dynatemp_range": [0],
    "id_slot": [-1],
    "min_keep": [0],
    "mirostat": [0],
    "n_keep": [0],
    "n_probs": [0],
    "post_sampling_probs": [False],
    "reasoning_format": ["none", "auto", "deepseek"],
    "repeat_penalty": [1],
    "return_progress": [False],
    "t_max_predict_ms": [0],
    "top_n_sigma": [-1],
    "typical_p": [1],
    "xtc_probability": [0],
}
HARMLESS = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")  # they do not change the answer
# Accepted without effect, and reported: they ask for a service, a speed or a style that this server does not have.
IGNORED = (
    *("service_tier", "verbosity", "prediction", "web_search_options"),
    # llama.cpp's: a slot, an order or a limit of time that kvarn does not have, or what changes no answer here
    *("id_slot", "cache_prompt", "n_keep", "samplers", "min_keep", "t_max_predict_ms"),
)


class Fields(NamedTuple):
    """The fields of a body: those with an effect, and those that are accepted besides."""

    table: Mapping[str, Schema]
    required: tuple[str, ...] = ()
    harmless: tuple[str, ...] = HARMLESS
    ignored: tuple[str, ...] = IGNORED
    no_ops: Mapping[str, list[Any]] = NO_OPS
