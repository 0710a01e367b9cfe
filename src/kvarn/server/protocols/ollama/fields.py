"""The fields of Ollama's endpoints."""

from typing import Any

from kvarn.server.chat_fields import CALL, MARKUP, TEXT, TEXT_OR_NULL
from kvarn.server.protocols.openai.embeddings import SETTINGS
from kvarn.server.request_fields import CHAT, MIXED, SHARED, Fields
from kvarn.server.schema import Schema

LIMIT: Schema = {"type": "integer", "minimum": -2, "maximum": 2**31 - 1, "description": "-1 and -2: as many as fit"}
# An option, and the name that it has in OpenAI's API or in vLLM's.
RENAMED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
# They are about the machine, or kvarn decides about them when it starts. The answer names them.
TOLD_OPTIONS = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram"),
    *("numa", "f16_kv", "vocab_only", "repeat_last_n", "penalize_newline", "draft_num_predict"),
)
OFF_OPTIONS: dict[str, Schema] = {  # samplers that kvarn does not have, and the values that switch them off
    "mirostat": {"enum": [0]},
    "mirostat_tau": {},
    "mirostat_eta": {},
    "typical_p": {"enum": [1]},
    "tfs_z": {"enum": [1]},
}
OPTIONS: Schema = {
    "type": "object",
    "properties": {
        **{name: {"anyOf": [SHARED[own], {"type": "null"}]} for name, own in RENAMED.items()},
        "num_predict": {"anyOf": [LIMIT, {"type": "null"}]},
        **{name: {"description": "accepted; has no effect, and the answer says so"} for name in TOLD_OPTIONS},
        **OFF_OPTIONS,
    },
    "additionalProperties": False,
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": TEXT_OR_NULL,
        "thinking": TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": CALL, "maxItems": 256}, {"type": "null"}]},
        "tool_name": TEXT_OR_NULL,
        "name": TEXT_OR_NULL,
        "tool_call_id": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]},
        "images": {"anyOf": [{"type": "array"}, {"type": "null"}], "description": "not implemented"},
    },
    "required": ["role"],
    "additionalProperties": False,
}
COMMON: dict[str, Schema] = {
    "model": SHARED["model"],
    "stream": {"type": "boolean", "description": "the default is true"},
    "format": {
        "anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}],
        "description": "json, or a JSON schema",
    },
    "options": OPTIONS,
    "think": {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["low", "medium", "high"]}]},
    "logprobs": {"type": "boolean"},
    "top_logprobs": CHAT["top_logprobs"],
    **{name: SHARED[name] for name in ("request_id", "cache_salt", "cache_priority")},
}
TOLD = ("keep_alive",)
NO_IMAGES: dict[str, list[Any]] = {"images": [[]], "truncate": [True, False], "shift": [True, False]}
CHAT_FIELDS = Fields(
    {
        "messages": {
            "type": "array",
            "items": MESSAGE,
            "maxItems": 4096,
            "description": "without one nothing is computed",
        },
        "tools": MARKUP["tools"],
        **COMMON,
    },
    ("model",),
    (),
    TOLD,
    NO_IMAGES,
)
GENERATE_FIELDS = Fields(
    {
        "prompt": {**TEXT, "description": "without one nothing is computed"},
        "suffix": {**TEXT, "description": "the answer belongs between prompt and suffix"},
        "system": TEXT,
        "raw": {"type": "boolean", "description": "the prompt is not put into the chat template"},
        **COMMON,
    },
    ("model",),
    (),
    (*TOLD, "context"),
    NO_IMAGES | {"template": [""]},
)
VECTOR_OPTIONS: dict[str, Schema] = {"options": {"type": "object"}, "truncate": {"type": "boolean"}}
EMBED_FIELDS = Fields(
    {"input": MIXED, **VECTOR_OPTIONS, "model": SHARED["model"], "dimensions": SETTINGS["dimensions"]},
    ("model", "input"),
    (),
    TOLD,
    {},
)
OLD_EMBED_FIELDS = Fields(
    {"prompt": TEXT, **VECTOR_OPTIONS, "model": SHARED["model"]}, ("model", "prompt"), (), TOLD, {}
)
SHOW_FIELDS = Fields(
    {"model": SHARED["model"], "name": SHARED["model"], "verbose": {"type": "boolean"}}, (), (), (), {}
)
