"""Checks values against JSON schemas. The OpenAPI document publishes the same schemas.

Only the keywords that our own tables use are implemented. Another keyword is a bug in the tables and
raises AssertionError. Non-goals: references, formats, and everything else that our requests do not need.
"""

import math
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Schema = Json

TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", lambda value, bound: value >= bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
    "exclusiveMinimum": ("above", lambda value, bound: value > bound),
}
SIZES: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "minLength": ("at least {} characters", lambda size, bound: size >= bound),
    "maxLength": ("at most {} characters", lambda size, bound: size <= bound),
    "minItems": ("at least {} items", lambda size, bound: size >= bound),
    "maxItems": ("at most {} items", lambda size, bound: size <= bound),
    "maxProperties": ("at most {} entries", lambda size, bound: size <= bound),
}
INSIDE = {"items", "properties", "required", "additionalProperties", "propertyNames", "pattern"}


def nullable(schema: Schema) -> Schema:
    """The schema that also allows null."""
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}


def problem(value: Any, schema: Schema, name: str) -> str | None:
    """The first error, in one line; None if the value is valid."""
    if "anyOf" in schema:
        errors = [problem(value, option, name) for option in schema["anyOf"]]
        if None in errors:
            return None
        fits = [e for e, o in zip(errors, schema["anyOf"], strict=True) if TYPES[o.get("type", "null")](value)]
        return (fits or [f"{name} is {show(value)}; it must be {_kinds(schema)}"])[0]
    if "type" in schema and not TYPES[schema["type"]](value):
        return f"{name} is {show(value)}; it must be {_kinds(schema)}"
    for word, bound in schema.items():
        if (error := _wrong(value, word, bound, name)) is not None:
            return error
    return _inside(value, schema, name)


def _wrong(value: Any, word: str, bound: Any, name: str) -> str | None:
    if word == "enum":
        if not any(value == each and type(value) is type(each) for each in bound):
            return f"{name} is {show(value)}; it must be one of {', '.join(show(each) for each in bound)}"
    elif word in BOUNDS:
        words, holds = BOUNDS[word]
        if not holds(value, bound):
            return f"{name} is {show(value)}; it must be {words} {bound}"
    elif word in SIZES:
        words, fits = SIZES[word]
        if not fits(len(value), bound):
            return f"{name} has {len(value)}; it must have {words.format(bound)}"
    elif word not in INSIDE and word not in ("type", "description", "default"):
        raise AssertionError(f"the tables use {word!r}, which is not checked")
    return None


def _inside(value: Any, schema: Schema, name: str) -> str | None:
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            if error := problem(item, schema["items"], f"{name}[{i}]"):
                return error
    if isinstance(value, dict):
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is False:
                return f"{name}.{show(key)[1:-1]} is not implemented: leave it out"
            if isinstance(inner, dict) and (error := problem(item, inner, f"{name}.{show(key)[1:-1]}")):
                return error
        for key in schema.get("required", ()):
            if key not in value:
                return f"{name}.{key} is missing"
    return None


def _kinds(schema: Schema) -> str:
    options = [option.get("type", "a known value") for option in schema.get("anyOf", [schema])]
    return " or ".join(dict.fromkeys(f"{'an' if kind[0] in 'aeio' else 'a'} {kind}" for kind in options)).replace(
        "a null", "null"
    )


def show(value: Any) -> str:
    """A value as errors quote it: in JSON's notation, in one short line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = f'"{value}"' if isinstance(value, str) else ascii(value)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-12:]}"
