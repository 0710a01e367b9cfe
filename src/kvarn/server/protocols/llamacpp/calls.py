"""llama.cpp's /completion and /infill: from a body to a call."""

from dataclasses import replace
from typing import Any

from kvarn.engine.pooling import LAST
from kvarn.server.ignored import Ignored, is_no_op
from kvarn.server.parse import UNLIMITED, Call, Mixed, call_of, checked, mixed_prompts
from kvarn.server.protocols.llamacpp.fields import COMPLETION, INFILL, TOLD, UNCHANGED
from kvarn.server.refusal import Refusal
from kvarn.server.schema import TYPES, show
from kvarn.text.infill import Extra

MOST_CHOICES = 128  # prompts times n_cmpl
FORBIDDEN = -100.0  # a bias
MOST_IDS = 2**31
SAMPLERS = {"penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"}


def completion_call(raw: bytes) -> Call:
    body = checked(raw, COMPLETION)
    return _call(body, mixed_prompts(body["prompt"], "prompt"))


def infill_call(raw: bytes) -> Call:
    body = checked(raw, INFILL)
    before = body["input_prefix"] + body.get("prompt", "")
    extra = [Extra(each["filename"], each["text"]) for each in body.get("input_extra", ())]
    return replace(_call(body, [before]), suffix=body["input_suffix"], extra=extra)


def _call(body: dict[str, Any], prompts: list[Mixed]) -> Call:
    limit = _one_of(body, "n_predict", "max_tokens")
    n = _one_of(body, "n_cmpl", "n") or 1
    if len(prompts) * n > MOST_CHOICES:
        raise Refusal(400, f"{len(prompts)} prompts times n_cmpl is more than {MOST_CHOICES}: split the call", "prompt")
    ids, texts = _biases(body.get("logit_bias", {}))
    named = {name: body[name] for name in body if name not in ("logit_bias", "max_tokens", "n_cmpl", "repeat_penalty")}
    if "repeat_penalty" in body:
        named["repetition_penalty"] = body["repeat_penalty"]
    call = call_of(
        named | {"n": n},
        body["n_probs"] if body.get("n_probs") else None,
        UNLIMITED if limit is None or limit < 0 else limit,
        prompts=prompts,
        ignored=_told(body),
    )
    given: dict[str, Any] = {name: body[name] for name in ("return_tokens", "response_fields") if name in body}
    return replace(
        call,
        settings=call.settings | {"logit_bias": ids},
        biased_texts=texts,
        special=True,
        given=given,
        timed=bool(body.get("timings_per_token")),
        watched=bool(body.get("return_progress")),
        pooling=LAST if limit == 0 else None,
        max_tokens=1 if limit == 0 else call.max_tokens,
    )


def _one_of(body: dict[str, Any], *names: str) -> int | None:
    given = {int(body[name]) for name in names if name in body}
    if len(given) > 1:
        raise Refusal(400, f"{names[0]} and {names[1]} differ: give one of them", names[1])
    return next(iter(given), None)


def _told(body: dict[str, Any]) -> list[Ignored]:
    told = [name for name in TOLD if name in body and not is_no_op(name, body[name], UNCHANGED)]
    if isinstance(body.get("samplers"), list) and set(map(str, body["samplers"])) >= SAMPLERS:
        told.remove("samplers")  # all of them, as here
    if float(body.get("repeat_penalty", 1)) == 1 and "repeat_last_n" in told:
        told.remove("repeat_last_n")
    return [Ignored(name, name) for name in told]


def _biases(given: Any) -> tuple[dict[int, float], dict[str, float]]:
    """By token id, and by text. A key of an object that is a number is a token id."""
    pairs = given
    if isinstance(given, dict):
        pairs = [(int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key, given[key]) for key in given]
    ids: dict[int, float] = {}
    texts: dict[str, float] = {}
    for key, value in pairs:
        bias = FORBIDDEN if value is False else value
        if not TYPES["number"](bias) or not FORBIDDEN <= bias <= -FORBIDDEN:
            message = f"logit_bias has the bias {show(value)}; give a number from -100 to 100, or false"
            raise Refusal(400, message, "logit_bias", logged="logit_bias has a wrong bias")
        if isinstance(key, str):
            texts[key] = float(bias)
        elif not TYPES["integer"](key) or not 0 <= key < MOST_IDS:
            message = f"logit_bias has the token {show(key)}; give a token id or a text"
            raise Refusal(400, message, "logit_bias", logged="logit_bias has a wrong token")
        else:
            ids[int(key)] = float(bias)
    return ids, texts
