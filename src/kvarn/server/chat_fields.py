"""The schemas of messages, tools and structures in requests, and which of their parts are accepted without effect.

Parts that are accepted without effect are reported in the answer (ignored.py).
"""

from kvarn.chats.tools import MOST_TOOLS
from kvarn.server.schema import Schema

TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"anyOf": [TEXT, {"type": "null"}]}
OBJECT: Schema = {"type": "object"}
# Of messages that clients send back as they got them. What they hold is not in the prompt.
UNUSED_IN_MESSAGE = (
    *("refusal", "audio", "annotations", "parsed", "reasoning_details", "thinking_blocks"),
    *("provider_specific_fields", "images"),
)
HINTS = ("cache_control", "prompt_cache_breakpoint")  # to the cache, in messages, parts and tools (cache_hints.py)
USED_IN_TOOL = ("type", "function", *HINTS)
UNUSED_IN_TOOL = ("strict",)
USED_IN_CALL = ("id", "type", "function")
UNUSED_IN_CALL = ("index",)
USED_IN_PART = ("type", "text", *HINTS)
UNUSED_IN_PART = ("citations", "annotations")

PART: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": TEXT},
    "required": ["type", "text"],
    "description": "other fields of a part are accepted, have no effect and are reported",
}
CALL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 256},
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 256},
                "arguments": {"anyOf": [TEXT, OBJECT], "description": "JSON text of an object, or an object"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
    "description": "other fields of a call are accepted, have no effect and are reported",
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": PART}, {"type": "null"}]},
        "name": TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": CALL, "maxItems": 256}, {"type": "null"}]},
        "tool_call_id": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]},
        "reasoning_content": TEXT_OR_NULL,
        "reasoning": TEXT_OR_NULL,
        "function_call": {"type": "null"},
        **{key: {"description": "accepted; raises cache_priority"} for key in HINTS},
        **{key: {"description": "accepted; has no effect"} for key in UNUSED_IN_MESSAGE},
    },
    "required": ["role"],
    "additionalProperties": False,
}

FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "description": TEXT_OR_NULL,
        "parameters": {"anyOf": [OBJECT, {"type": "null"}], "description": "the JSON schema of the arguments"},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name"],
}
TOOL: Schema = {
    "type": "object",
    "properties": {"type": TEXT, "function": FUNCTION},
    "required": ["type"],
    "description": "of type function; tools of other types and other fields are accepted, have no effect and are "
    "reported",
}
MARKUP: dict[str, Schema] = {  # fields of a chat that only chats have
    "tools": {"type": "array", "items": TOOL, "maxItems": MOST_TOOLS},
    "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, OBJECT]},
    "parallel_tool_calls": {"type": "boolean"},
    "reasoning_effort": {"type": "string", "maxLength": 32, "description": "handed to the chat template"},
    "reasoning_format": {
        "type": "string",
        "enum": ["none", "auto", "deepseek"],
        "description": "none: reasoning stays in the text",
    },
    "include_reasoning": {"type": "boolean", "description": "false: the answer does not have the reasoning"},
    "continue_final_message": {
        "type": "boolean",
        "description": "the answer continues the text of the last message (default: if it is the assistant's)",
    },
    "add_generation_prompt": {
        "type": "boolean",
        "description": "true: the answer is a message of its own; false: only to continue the last message",
    },
    "chat_template_kwargs": {
        "type": "object",
        "maxProperties": 32,
        "description": "variables of the chat template, such as enable_thinking",
    },
}

STRUCTURES: dict[str, Schema] = {  # what the answer must look like: at most one of them in a request
    "response_format": {**OBJECT, "description": "text, json_object, or json_schema with its schema"},
    "structured_outputs": {**OBJECT, "description": "vLLM's: one of json, regex, choice, grammar, json_object"},
    "json_schema": {**OBJECT, "description": "llama.cpp's: a JSON schema"},
    "grammar": {**TEXT, "description": "llama.cpp's: GBNF"},
}
