"""OpenAI's chat completions and completions: from a body to a call."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvarn.server.parse import COMPLETION_TOKENS, Call, call_of, checked
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import CHAT, COMPLETION, Fields
from kvarn.server.talk import check_opening, talk_of
from kvarn.text.tokenizer import Prompt

CHAT_FIELDS = Fields(CHAT, ("messages",))
COMPLETION_FIELDS = Fields(COMPLETION, ("prompt",))
MOST_CHOICES = 128  # prompts times n of one call


def chat_call(raw: bytes) -> Call:
    body = checked(raw, CHAT_FIELDS)
    top = body.get("top_logprobs")
    if top and not body.get("logprobs"):
        raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
    limits = {int(body[name]) for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(limits) > 1:
        raise Refusal(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    logprobs = int(top or 0) if body.get("logprobs") else None
    call = call_of(body, talk=check_opening(body, talk_of(body)), logprobs=logprobs, limit=max(limits, default=None))
    return _extended(call, body)


def completion_call(raw: bytes) -> Call:
    body = checked(raw, COMPLETION_FIELDS)
    prompts = _prompts(body["prompt"])
    if len(prompts) * int(body.get("n", 1)) > MOST_CHOICES:
        raise Refusal(400, f"{len(prompts)} prompts times n is more than {MOST_CHOICES}: split the call", "prompt")
    limit = int(body["max_tokens"]) if "max_tokens" in body else None
    logprobs = int(body["logprobs"]) if "logprobs" in body else None
    call = call_of(body, prompts=prompts, logprobs=logprobs, limit=limit, default_tokens=COMPLETION_TOKENS)
    return _extended(replace(call, suffix=body.get("suffix") or None), body)


def _extended(call: Call, body: dict[str, Any]) -> Call:
    """With the extensions of other engines."""
    if "prompt_logprobs" in body and call.stream:
        raise Refusal(400, "prompt_logprobs are not part of a stream: leave stream out", "prompt_logprobs")
    timed, given = bool(body.get("timings_per_token")), call.given | {"verbose": bool(body.get("verbose"))}
    watched, token_ids = bool(body.get("return_progress")), bool(body.get("return_token_ids"))
    return replace(call, timed=timed, watched=watched, token_ids=token_ids, given=given)


def _prompts(value: Any) -> Sequence[Prompt]:
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value}
    if kinds == {str}:
        return list(value)
    if kinds <= {int, float}:
        return [[int(token) for token in value]]
    if kinds == {list}:
        return [[int(token) for token in ids] for ids in value]
    raise Refusal(400, "prompt mixes texts and tokens: give a text, texts, token ids, or lists of them", "prompt")
