"""Parses and checks request bodies. A refusal names the wrong field.

No field is ignored silently: a field that is not implemented is refused, unless its value is a no-op or the answer
reports it (ignored.py). Non-goals: tokenization, and anything else that needs the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvarn.errors import BadStructure
from kvarn.server.cache_hints import priority_of
from kvarn.server.ignored import Ignored, is_no_op, of_body, of_constraint
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import DETOKENIZE, TOKENIZE, Fields
from kvarn.server.request_id import sane
from kvarn.server.schema import problem, show
from kvarn.server.talk import Talk, check_opening, talk_of
from kvarn.structured import (
    Structure,
    from_gbnf,
    from_json_schema,
    from_response_format,
    from_structured_outputs,
)
from kvarn.text.infill import Extra

# Items take more memory than their text. Their separators are counted, also those in strings: a text with so many
# would not fit into any context.
MOST_CONTAINERS = 1 << 18  # { and [
MOST_ITEMS = 1 << 20  # commas
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
OF_CONTENT = ("add_special", "parse_special", "with_pieces")  # llama.cpp's fields of /tokenize
Mixed = str | Sequence[int | str]  # a prompt: a text, token ids, or both in turns


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request for text."""

    talk: Talk | None  # of a chat
    prompts: list[Mixed]  # of a completion
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
    given: dict[str, Any] = field(default_factory=dict)  # fields that the reply gives back
    special: bool = False  # control tokens in the text of a prompt are recognized
    suffix: str | None = None  # the answer belongs between the prompt and this text
    extra: Sequence[Extra] = ()  # other files, if there is a suffix
    biased_texts: Mapping[str, float] = field(default_factory=dict)  # a bias for every token of these texts
    timed: bool = False  # timings in every chunk
    watched: bool = False  # a stream tells how much of the prompt is computed
    token_ids: bool = False  # the answer has the ids of its tokens and of the prompt's
    pooling: str | None = None  # an embedding is asked for; empty: pooled as the model says
    kept: bool = False  # the answer can be read again by its id
    text_logprobs: bool = False  # log-probabilities only of what comes after the reasoning
    compared: str | None = None  # the id of an earlier response to compare with

    @property
    def chat(self) -> bool:
        return self.talk is not None

    @property
    def n(self) -> int:
        n: int = self.settings["n"]
        return n


def tokenize_call(raw: bytes) -> dict[str, Any]:
    body = checked(raw, Fields(TOKENIZE))
    if sum(name in body for name in ("prompt", "content", "messages")) != 1:
        raise Refusal(400, "give prompt or content (a text) or messages", "prompt")
    if "content" not in body and (wrong := [name for name in OF_CONTENT if name in body]):
        raise Refusal(400, f"{wrong[0]} belongs to content, not to prompt or messages", wrong[0])
    if "content" in body and "add_special_tokens" in body:
        raise Refusal(400, "add_special_tokens belongs to prompt: give add_special", "add_special_tokens")
    if "messages" in body:
        body["talk"] = check_opening(body, talk_of(body))
    return body


def detokenize_call(raw: bytes) -> dict[str, Any]:
    return checked(raw, Fields(DETOKENIZE, ("tokens",)))


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


def checked(raw: bytes, fields: Fields) -> dict[str, Any]:
    """The checked fields of the body. A field that is null counts as absent."""
    body = {name: value for name, value in parse(raw).items() if value is not None}
    for name in fields.required:
        if name not in body:
            raise Refusal(400, f"{name} is missing", name)
    for name, value in body.items():
        if name in fields.table:
            if wrong := problem(value, fields.table[name], name):
                raise Refusal(400, wrong.message, name, logged=wrong.unquoted)
        elif name not in (*fields.harmless, *fields.ignored) and not is_no_op(name, value, fields.no_ops):
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


def mixed_prompts(value: Any, name: str) -> list[Mixed]:
    """The prompts of a field of the schema MIXED: a list of texts is several prompts, and so is one that has lists or
    objects. A list of token ids, or of ids and texts in turns, is one."""
    if not isinstance(value, list):
        return [_mixed(value)]
    kinds = {type(item) for item in value}
    if kinds == {str} or kinds & {list, dict}:
        return [_mixed([item] if isinstance(item, int | float) else item) for item in value]
    if not value:
        raise Refusal(400, f"{name} is empty: give a text or token ids", name)
    return [_mixed(value)]


def _mixed(value: Any) -> Mixed:
    if isinstance(value, dict):
        text: str = value["prompt_string"]
        return text
    return value if isinstance(value, str) else [item if isinstance(item, str) else int(item) for item in value]


def call_of(
    body: dict[str, Any],
    logprobs: int | None,
    limit: int | None,
    talk: Talk | None = None,
    prompts: Sequence[Mixed] | None = None,
    default_tokens: int | None = None,
    ignored: list[Ignored] | None = None,
) -> Call:
    """The call of a body whose settings have OpenAI's names. `ignored`: if the body is a translation, what the
    original has without effect."""
    stream, options = bool(body.get("stream", False)), body.get("stream_options", {})
    if any(options.values()) and not stream:
        raise Refusal(400, "stream_options needs stream: true", "stream_options")
    if "request_id" in body and not sane(body["request_id"]):
        raise Refusal(400, "request_id has characters that a header cannot carry: use printable ASCII", "request_id")
    structure, structure_field = _structure(body)
    settings = _settings(body, logprobs)
    ignored = of_body(body) if ignored is None else ignored
    if structure is not None and talk is None:  # that of a chat also depends on its tools
        ignored = ignored + of_constraint(settings["stop"], "")
    return Call(
        talk=talk,
        prompts=list(prompts or []),
        structure=structure,
        structure_field=structure_field,
        ignored=ignored,
        settings=settings,
        max_tokens=None if limit == UNLIMITED else limit,
        default_tokens=None if limit == UNLIMITED else default_tokens,
        model=body.get("model"),
        stream=stream,
        echo=bool(body.get("echo")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        request_id=body.get("request_id"),
        cache_salt=body.get("cache_salt"),
        cache_priority=priority_of(body),
        compared=(body.get("prompt_cache_options") or {}).get("comparison_response_id"),
    )


def _settings(body: dict[str, Any], logprobs: int | None) -> dict[str, Any]:
    """What is not given is left out, so that the model's own defaults hold."""
    stop = body.get("stop", ())
    settings: dict[str, Any] = {name: float(body[name]) for name in NUMBERS if name in body}
    of_prompt = logprobs if body.get("echo") else None
    if "prompt_logprobs" in body:
        if of_prompt is not None:
            raise Refusal(400, "echo with logprobs reports the prompt: leave prompt_logprobs out", "prompt_logprobs")
        of_prompt = int(body["prompt_logprobs"])
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
        "prompt_logprobs": of_prompt,
    }


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            message = f"logit_bias has the key {show(key)}; keys are token ids"
            raise Refusal(400, message, "logit_bias", logged="logit_bias: keys are token ids")
    return {int(key): float(bias) for key, bias in value.items()}
