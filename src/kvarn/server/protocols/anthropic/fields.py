"""The fields of Anthropic's messages: their schemas, and what is accepted without effect."""

from typing import Any

from kvarn.chats.tools import MOST_TOOLS
from kvarn.server.request_fields import CHAT, SHARED, STOP, Fields
from kvarn.server.schema import Schema

TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
BLOCK: Schema = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
BLOCKS: Schema = {"anyOf": [TEXT, {"type": "array", "items": BLOCK, "maxItems": 4096}]}
MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": BLOCKS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"anyOf": [TEXT, {"type": "null"}]},
        "name": TEXT,
        "description": {"anyOf": [TEXT, {"type": "null"}]},
        "input_schema": {"anyOf": [OBJECT, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "description": "tools of a type other than custom, and other fields, are accepted, have no effect and are reported",
}
CHOICE: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": TEXT,
        "disable_parallel_tool_use": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["type"],
    "additionalProperties": False,
}
THINKING: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]},
        "budget_tokens": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, {"type": "null"}]},
    },
    "required": ["type"],
}
FORMAT: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["json_schema"]}, "schema": OBJECT},
    "required": ["type", "schema"],
}
CACHE_CONTROL: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["ephemeral"]}, "ttl": TEXT},
    "description": "keep the prompt longer in the cache; here, in tools, in blocks",
}
MESSAGES: dict[str, Schema] = {
    "model": SHARED["model"],
    "messages": {"type": "array", "items": MESSAGE, "maxItems": 4096},
    "system": BLOCKS,
    "tools": {"type": "array", "items": TOOL, "maxItems": MOST_TOOLS},
    "tool_choice": CHOICE,
    "thinking": THINKING,
    "output_config": {
        "type": "object",
        "properties": {
            "effort": {"anyOf": [{"type": "string", "maxLength": 32}, {"type": "null"}]},
            "format": {"anyOf": [FORMAT, {"type": "null"}]},
        },
    },
    "output_format": FORMAT,
    "cache_control": CACHE_CONTROL,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "max_tokens": {
        "type": "integer",
        "minimum": 1,
        "maximum": 2**31 - 1,
        "description": "if it is not given, or more than fits: as many as fit",
    },
    "stop_sequences": {"type": "array", "items": STOP, "maxItems": 64},
    "diagnostics": {
        "type": "object",
        "properties": {"previous_message_id": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]}},
        "description": "compare with an earlier answer: what changed in the prompt",
    },
    **{
        name: SHARED[name]
        for name in ("temperature", "top_p", "top_k", "stream", "seed", "request_id", "cache_salt", "cache_priority")
    },
}
# They ask for a service, a speed or a tool that this server does not have.
IGNORED = (
    *("service_tier", "context_management", "container", "mcp_servers", "inference_geo", "speed", "betas"),
    *("fallbacks", "user_profile_id", "workspace_id"),
)
NO_OPS: dict[str, list[Any]] = {
    "service_tier": ["auto", "standard_only"],
    "speed": ["standard"],
    "mcp_servers": [[]],
    "betas": [[]],
    "inference_geo": ["global"],
    "fallbacks": [[]],
}
FIELDS = Fields(MESSAGES, ("messages",), ("metadata",), IGNORED, NO_OPS)
# Fields that have an effect, or none that matters, by where they are. Others are reported.
USED_IN_BLOCK = {
    "text": ("text", "cache_control"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "cache_control", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error", "cache_control"),
}
UNUSED_IN_BLOCK = ("citations",)
USED_IN_TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control")
UNUSED_IN_TOOL = ("input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
USED_IN_THINKING = ("type",)
UNUSED_IN_THINKING = ("budget_tokens", "display")
USED_IN_CONFIG = ("effort", "format")
UNUSED_IN_CONFIG = ("task_budget",)
SERVER_TOOLS = (
    *("web_search", "web_fetch", "code_execution", "bash", "text_editor", "computer", "memory", "mcp_toolset"),
    *("tool_search_tool_regex", "tool_search_tool_bm25", "advisor", "browser_toolset", "computer_toolset"),
)
