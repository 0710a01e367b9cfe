"""Parses and checks request bodies. A refusal names the wrong field.

No field is ignored silently: a field that is not implemented is refused, unless its value is a no-op or the answer
reports it (ignored.py). Non-goals: tokenization, and anything else that needs the model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvarn.errors import BadStructure
from kvarn.server.ignored import Ignored, is_no_op, of_body, of_constraint
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import CHAT, COMPLETION, DETOKENIZE, HARMLESS, IGNORED, TOKENIZE
from kvarn.server.request_id import sane
from kvarn.server.schema import Schema, problem, show
from kvarn.server.talk import Talk, talk_of
from kvarn.structured import (
    Structure,
    from_gbnf,
    from_json_schema,
    from_response_format,
    from_structured_outputs,
)
from kvarn.text.tokenizer import Prompt

# Items take more memory than their text. Their separators are counted, also those in strings: a text with so many
# would not fit into any context.
MOST_CONTAINERS = 1 << 18  # { and [
MOST_ITEMS = 1 << 20  # commas
MOST_CHOICES = 128  # prompts times n of one call
COMPLETION_TOKENS = 16  # OpenAI's default max_tokens of a completion; a chat may fill the context
UNLIMITED = -1  # a max_tokens: as many as fit
RANDOM = -1  # a seed: vLLM and llama.cpp draw one
STRUCTURES = {
    "response_format": from_response_format,
    "structured_outputs": from_structured_outputs,
    "json_schema": from_json_schema,
    "grammar": from_gbnf,
}
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request for text."""

    talk: Talk | None  # of a chat
    prompts: list[Prompt]  # of a completion
    structure: Structure | None  # what the answer must look like
    structure_field: str  # the field that has it
    ignored: list[Ignored]  # what was accepted without effect
    settings: dict[str, Any]  # arguments of SamplingParams, without max_tokens; those that the request has
    max_tokens: int | None  # None: not given
    default_tokens: int | None  # if max_tokens is not given; None: as many as fit
    model: str | None
    stream: bool
    echo: bool  # the prompt comes first in the answer
    include_usage: bool
    continuous_usage: bool  # usage in every chunk
    request_id: str | None
    cache_salt: str | None
    cache_priority: int

    @property
    def chat(self) -> bool:
        return self.talk is not None

    @property
    def n(self) -> int:
        n: int = self.settings["n"]
        return n


def chat_call(raw: bytes) -> Call:
    body = _checked(raw, CHAT, ("messages",))
    top = body.get("top_logprobs")
    if top and not body.get("logprobs"):
        raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
    limits = {int(body[name]) for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(limits) > 1:
        raise Refusal(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    logprobs = int(top or 0) if body.get("logprobs") else None
    return _call(body, talk=talk_of(body), logprobs=logprobs, limit=max(limits, default=None))


def completion_call(raw: bytes) -> Call:
    body = _checked(raw, COMPLETION, ("prompt",))
    prompts = _prompts(body["prompt"])
    if len(prompts) * int(body.get("n", 1)) > MOST_CHOICES:
        raise Refusal(400, f"{len(prompts)} prompts times n is more than {MOST_CHOICES}: split the call", "prompt")
    limit = int(body["max_tokens"]) if "max_tokens" in body else None
    logprobs = int(body["logprobs"]) if "logprobs" in body else None
    return _call(body, prompts=prompts, logprobs=logprobs, limit=limit)


def tokenize_call(raw: bytes) -> dict[str, Any]:
    body = _checked(raw, TOKENIZE, ())
    if sum(name in body for name in ("prompt", "content", "messages")) != 1:
        raise Refusal(400, "give prompt (a text) or messages", "prompt")
    if "messages" in body:
        body["talk"] = talk_of(body)
    return body


def detokenize_call(raw: bytes) -> dict[str, Any]:
    return _checked(raw, DETOKENIZE, ("tokens",))


def parse(raw: bytes) -> dict[str, Any]:
    if raw.count(b"{") + raw.count(b"[") > MOST_CONTAINERS or raw.count(b",") > MOST_ITEMS:
        raise Refusal(400, f"the body has more than {MOST_ITEMS} items, or {MOST_CONTAINERS} objects and lists")
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode("utf-8")  # an escape can be half of a surrogate pair
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise Refusal(400, "the body has half of a surrogate pair in a string, which is not a character") from None
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON that can be read: {str(error)[:120]}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {show(body)}; it must be an object", logged="the body must be an object")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _checked(raw: bytes, table: Mapping[str, Schema], required: tuple[str, ...]) -> dict[str, Any]:
    """The checked fields of the body. A field that is null counts as absent."""
    body = {name: value for name, value in parse(raw).items() if value is not None}
    for name in required:
        if name not in body:
            raise Refusal(400, f"{name} is missing", name)
    for name, value in body.items():
        if name in table:
            if wrong := problem(value, table[name], name):
                raise Refusal(400, wrong.message, name, logged=wrong.unquoted)
        elif name not in HARMLESS and name not in IGNORED and not is_no_op(name, value):
            shown = show(name)[1:-1]
            raise Refusal(400, f"{shown} is not implemented here: leave it out", shown, "unsupported_parameter")
    return body


def _structure(body: dict[str, Any]) -> tuple[Structure | None, str]:
    """What the answer must look like, and the field that says so."""
    found: list[tuple[Structure, str]] = []
    for name, read in STRUCTURES.items():
        try:
            structure = read(body.get(name))
        except BadStructure as error:
            raise Refusal(400, str(error), name, logged=f"{name} cannot be used") from None
        if structure is not None:
            found.append((structure, name))
    if len(found) > 1:
        raise Refusal(400, f"{found[0][1]} and {found[1][1]} both shape the answer: give one of them", found[1][1])
    return found[0] if found else (None, "")


def _prompts(value: Any) -> list[Prompt]:
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


def _call(
    body: dict[str, Any],
    logprobs: int | None,
    limit: int | None,
    talk: Talk | None = None,
    prompts: list[Prompt] | None = None,
) -> Call:
    stream, options = bool(body.get("stream", False)), body.get("stream_options", {})
    if any(options.values()) and not stream:
        raise Refusal(400, "stream_options needs stream: true", "stream_options")
    if "request_id" in body and not sane(body["request_id"]):
        raise Refusal(400, "request_id has characters that a header cannot carry: use printable ASCII", "request_id")
    structure, structure_field = _structure(body)
    settings = _settings(body, logprobs)
    constrained = structure is not None and talk is None  # that of a chat also depends on its tools
    return Call(
        talk=talk,
        prompts=prompts or [],
        structure=structure,
        structure_field=structure_field,
        ignored=of_body(body) + (of_constraint(settings["stop"], "") if constrained else []),
        settings=settings,
        max_tokens=None if limit == UNLIMITED else limit,
        default_tokens=None if talk or limit == UNLIMITED else COMPLETION_TOKENS,
        model=body.get("model"),
        stream=stream,
        echo=bool(body.get("echo")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        request_id=body.get("request_id"),
        cache_salt=body.get("cache_salt"),
        cache_priority=int(body.get("cache_priority", 0)),
    )


def _settings(body: dict[str, Any], logprobs: int | None) -> dict[str, Any]:
    """What is not given is left out, so that the model's own defaults hold."""
    stop = body.get("stop", ())
    settings: dict[str, Any] = {name: float(body[name]) for name in NUMBERS if name in body}
    if "top_k" in body:
        settings["top_k"] = max(int(body["top_k"]), 0)
    return settings | {
        "n": int(body.get("n", 1)),
        "seed": None if body.get("seed", RANDOM) == RANDOM else int(body["seed"]),
        "stop": tuple(each for each in ((stop,) if isinstance(stop, str) else stop) if each),
        "stop_token_ids": tuple(int(token) for token in body.get("stop_token_ids", ())),
        "ignore_eos": bool(body.get("ignore_eos", False)),
        "logit_bias": _bias(body.get("logit_bias", {})),
        "logprobs": logprobs,
        "prompt_logprobs": logprobs if body.get("echo") else None,
    }


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            message = f"logit_bias has the key {show(key)}; keys are token ids"
            raise Refusal(400, message, "logit_bias", logged="logit_bias: keys are token ids")
    return {int(key): float(bias) for key, bias in value.items()}
