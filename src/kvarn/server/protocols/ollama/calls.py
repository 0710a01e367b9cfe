"""Ollama's chat, generate and embed: from a body to a call."""

from dataclasses import replace
from typing import Any

from kvarn.server.ignored import Ignored, of_body
from kvarn.server.parse import UNLIMITED, Call, call_of, checked
from kvarn.server.protocols.ollama.fields import (
    CHAT_FIELDS,
    EMBED_FIELDS,
    GENERATE_FIELDS,
    OLD_EMBED_FIELDS,
    RENAMED,
    TOLD_OPTIONS,
)
from kvarn.server.protocols.openai.embeddings import call_for_vectors
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import Fields
from kvarn.server.talk import talk_of

LATEST = ":latest"  # Ollama adds it to names without a tag


def chat_call(raw: bytes) -> Call:
    body = _checked(raw, CHAT_FIELDS)
    messages = [_message(message, i) for i, message in enumerate(body.get("messages", ()))]
    return _call(body, CHAT_FIELDS, {"messages": messages, "tools": body.get("tools", [])} if messages else {})


def generate_call(raw: bytes) -> Call:
    body = _checked(raw, GENERATE_FIELDS)
    prompt, suffix = body.get("prompt", ""), body.get("suffix") or None
    if not prompt and suffix is None:
        return _call(body, GENERATE_FIELDS, {})
    if body.get("raw") or suffix is not None:
        for name in ("system", "think"):
            if body.get(name):
                raise Refusal(400, f"{name} needs the chat template: leave out {name}, raw and suffix", name)
        call = _call(body, GENERATE_FIELDS, {}, [prompt])
        return replace(call, suffix=suffix, special=True)
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return _call(body, GENERATE_FIELDS, {"messages": [*system, {"role": "user", "content": prompt}]})


def embed_call(raw: bytes) -> Call:
    body = _checked(raw, EMBED_FIELDS)
    call = call_for_vectors({name: body[name] for name in body if name not in ("options", "truncate")}, "input")
    return replace(call, ignored=_told(body, EMBED_FIELDS))


def old_embed_call(raw: bytes) -> Call:
    body = _checked(raw, OLD_EMBED_FIELDS)
    call = call_for_vectors({"prompt": body["prompt"], "model": body["model"]}, "prompt")
    return replace(call, ignored=_told(body, OLD_EMBED_FIELDS))


def _checked(raw: bytes, fields: Fields) -> dict[str, Any]:
    body = checked(raw, fields)
    return body | {"model": body["model"].removesuffix(LATEST)}


def _told(body: dict[str, Any], fields: Fields) -> list[Ignored]:
    options = body.get("options", {})
    unused = [name for name in options if options[name] is not None and name not in RENAMED]
    told = [*(name for name in fields.ignored if name in body)]
    return [Ignored(name, name) for name in told] + [
        Ignored(f"options.{name}", f"options.{name}") for name in unused if name in TOLD_OPTIONS
    ]


def _message(message: dict[str, Any], i: int) -> dict[str, Any]:
    """In OpenAI's form."""
    if message.get("images"):
        raise Refusal(400, f"messages[{i}].images is not implemented: the model reads text only", "messages")
    new = {name: value for name, value in message.items() if name in ("role", "tool_calls", "tool_call_id", "name")}
    if message.get("tool_name"):
        new["name"] = message["tool_name"]
    if message.get("thinking"):
        new["reasoning_content"] = message["thinking"]
    content = message.get("content")
    return new | {"content": None if not content and message.get("tool_calls") else content or ""}


def _call(body: dict[str, Any], fields: Fields, talk: dict[str, Any], prompts: list[str] | None = None) -> Call:
    """`talk`: the fields of a chat; empty if there is none."""
    options = {name: value for name, value in body.get("options", {}).items() if value is not None}
    named = {own: options[name] for name, own in RENAMED.items() if name in options}
    limit = int(named.pop("max_tokens", UNLIMITED))
    named |= {name: body[name] for name in ("model", "request_id", "cache_salt", "cache_priority") if name in body}
    if body.get("format"):
        schema = body["format"]
        named |= {"response_format": {"type": "json_object"}} if schema == "json" else {"json_schema": schema}
    logprobs = int(body.get("top_logprobs", 0)) if body.get("logprobs") else None
    try:
        call = call_of(
            named | {"stream": body.get("stream", True)},
            logprobs,
            UNLIMITED if limit < 0 else limit or 1,
            talk=talk_of(talk | _thinking(body)) if talk else None,
            prompts=prompts,
            ignored=_told(body, fields) + of_body({"tools": talk.get("tools", [])}),
        )
    except Refusal as error:
        if error.param not in ("response_format", "json_schema"):
            raise
        raise Refusal(
            400, str(error).replace(error.param, "format"), "format", logged="format cannot be used"
        ) from None
    return replace(call, structure_field="format" if call.structure_field else "")


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    think = body.get("think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    if think is None:
        return {}
    return {"chat_template_kwargs": {"enable_thinking": True}} if think else {"reasoning_effort": "none"}
