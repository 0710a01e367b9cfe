"""The fields of /v1/responses and the schemas of its input items."""

from kvarn.chats.tools import MOST_TOOLS
from kvarn.server.chat_fields import MARKUP, OBJECT, TEXT, TEXT_OR_NULL
from kvarn.server.request_fields import EXTENSIONS, HARMLESS, IGNORED, NO_OPS, SHARED, Fields
from kvarn.server.schema import Schema, nullable

ID: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
PART: Schema = {"type": "object", "properties": {"type": TEXT, "text": TEXT, "refusal": TEXT}, "required": ["type"]}
PARTS: Schema = {"type": "array", "items": PART}
CONTENT: Schema = {"anyOf": [TEXT, PARTS]}

MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message"]},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": CONTENT,
    },
    "required": ["role", "content"],
}
CALL: Schema = {
    "type": "object",
    "properties": {"call_id": ID, "name": ID, "arguments": TEXT},
    "required": ["call_id", "name", "arguments"],
}
CUSTOM_CALL: Schema = {
    "type": "object",
    "properties": {"call_id": ID, "name": ID, "input": TEXT},
    "required": ["call_id", "name", "input"],
}
RESULT: Schema = {
    "type": "object",
    "properties": {"call_id": ID, "output": CONTENT},
    "required": ["call_id", "output"],
}
REASONING: Schema = {
    "type": "object",
    "properties": {"summary": nullable(PARTS), "content": nullable(PARTS), "encrypted_content": TEXT_OR_NULL},
}
ITEMS: dict[str, Schema] = {
    "message": MESSAGE,
    "function_call": CALL,
    "function_call_output": RESULT,
    "custom_tool_call": CUSTOM_CALL,
    "custom_tool_call_output": RESULT,
    "reasoning": REASONING,
}
# Items of services that this server does not have: they are reported, and the model does not see them.
OTHER_ITEMS = (
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "image_generation_call"),
    *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "compaction", "compaction_trigger"),
)
BOOKKEEPING = ("id", "status", "type", "created_by")  # of items; they say nothing to a model
USED_IN_ITEM = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
UNUSED_IN_ITEM = ("summary", "encrypted_content", "phase", "namespace", "caller", "async", "name")
UNUSED_IN_PART = ("annotations", "logprobs")
USED_IN_TOOL = ("type", "name", "description", "parameters", "strict")
UNUSED_IN_TOOL = ("defer_loading", "allowed_callers", "output_schema")
INCLUDABLE = ("reasoning.encrypted_content", "message.output_text.logprobs")

TOOL: Schema = {
    "type": "object",
    "properties": {"type": TEXT},
    "required": ["type"],
    "description": "of type function; tools of other types and other fields are accepted, have no effect and are "
    "reported",
}
FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "description": TEXT_OR_NULL,
        "parameters": {"anyOf": [OBJECT, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name"],
}
TABLE: dict[str, Schema] = {
    "input": {
        "anyOf": [TEXT, {"type": "array", "items": OBJECT, "maxItems": 1 << 14}],
        "description": "a text, or items: message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, reasoning",
    },
    "instructions": TEXT,
    "previous_response_id": {**ID, "description": "continues the stored response, from its tokens"},
    "store": {"type": "boolean", "description": "default: true"},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "tools": {"type": "array", "items": TOOL, "maxItems": MOST_TOOLS},
    "tool_choice": MARKUP["tool_choice"],
    "parallel_tool_calls": MARKUP["parallel_tool_calls"],
    "text": {
        "type": "object",
        "properties": {
            "format": {"anyOf": [OBJECT, {"type": "null"}], "description": "text, json_object or json_schema"},
            "verbosity": TEXT_OR_NULL,
        },
        "additionalProperties": False,
    },
    "reasoning": {
        "type": "object",
        "properties": {"effort": nullable(MARKUP["reasoning_effort"])},
        "description": "effort is handed to the chat template; other fields are accepted and reported",
    },
    "include": {"type": "array", "items": {"type": "string", "maxLength": 256}, "maxItems": 64},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "truncation": {"type": "string", "enum": ["disabled", "auto"], "description": "auto is accepted and reported"},
    "metadata": {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 512},
        "maxProperties": 16,
    },
    "prompt_cache_key": {"type": "string", "maxLength": 1024},
    "safety_identifier": {"type": "string", "maxLength": 1024},
    "user": {"type": "string", "maxLength": 1024},
    "stream_options": {
        "type": "object",
        "properties": {"include_obfuscation": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        "additionalProperties": False,
    },
    "chat_template_kwargs": MARKUP["chat_template_kwargs"],
    **{name: EXTENSIONS[name] for name in ("timings_per_token", "return_progress")},
    **{
        name: SHARED[name]
        for name in (
            *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "request_id", "cache_salt", "cache_priority"),
            *("prompt_cache_retention", "prompt_cache_options"),
        )
    },
}
FIELDS = Fields(
    TABLE,
    ("input",),
    harmless=(*HARMLESS, "client_metadata", "access_programs"),
    ignored=(*IGNORED, "max_tool_calls", "context_management"),
    no_ops={**NO_OPS, "background": [False]},
)
