"""Checks values against JSON schemas. The OpenAPI document publishes the same schemas.

Only the keywords that our own tables use are implemented. Another keyword is a bug in the tables and
raises AssertionError. Non-goals: references, formats, and everything else that our requests do not need.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    "minLength": ("at least {} character", lambda size, bound: size >= bound),
    "maxLength": ("at most {} character", lambda size, bound: size <= bound),
    "minItems": ("at least {} item", lambda size, bound: size >= bound),
    "maxItems": ("at most {} item", lambda size, bound: size <= bound),
    "maxProperties": ("at most {} field", lambda size, bound: size <= bound),
}
INSIDE = {"items", "properties", "required", "additionalProperties", "propertyNames", "pattern"}


class Problem(NamedTuple):
    """What is wrong with a value: `temperature` `is -1` `it must be at least 0`."""

    field: str
    found: str
    rule: str = ""

    @property
    def message(self) -> str:
        return f"{self.field} {self.found}" + (f"; {self.rule}" if self.rule else "")

    @property
    def unquoted(self) -> str:
        """Without the value, which may be a text of a user."""
        return f"{self.field}: {self.rule}" if self.rule else self.message


def nullable(schema: Schema) -> Schema:
    """The schema that also allows null."""
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}


def problem(value: Any, schema: Schema, name: str) -> Problem | None:
    """The first error; None if the value is valid."""
    if "anyOf" in schema:
        errors = [problem(value, option, name) for option in schema["anyOf"]]
        if None in errors:
            return None
        fits = [e for e, o in zip(errors, schema["anyOf"], strict=True) if TYPES[o.get("type", "null")](value)]
        return (fits or [_must_be(name, value, _kinds(schema))])[0]
    if "type" in schema and not TYPES[schema["type"]](value):
        return _must_be(name, value, _kinds(schema))
    for word, bound in schema.items():
        if (error := _wrong(value, word, bound, name)) is not None:
            return error
    return _inside(value, schema, name)


def _must_be(name: str, value: Any, rule: str) -> Problem:
    return Problem(name, f"is {show(value)}", f"it must be {rule}")


def _wrong(value: Any, word: str, bound: Any, name: str) -> Problem | None:
    if word == "enum":
        if not any(same(value, each) for each in bound):
            return _must_be(name, value, f"one of {', '.join(show(each) for each in bound)}")
    elif word in BOUNDS:
        words, holds = BOUNDS[word]
        if not holds(value, bound):
            return _must_be(name, value, f"{words} {bound}")
    elif word in SIZES:
        words, fits = SIZES[word]
        if not fits(len(value), bound):
            return Problem(name, f"has {len(value)}", f"it must have {words.format(bound)}{'s' * (bound != 1)}")
    elif word not in INSIDE and word not in ("type", "description", "default"):
        raise AssertionError(f"the tables use {word!r}, which is not checked")
    return None


def _inside(value: Any, schema: Schema, name: str) -> Problem | None:
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            if error := problem(item, schema["items"], f"{name}[{i}]"):
                return error
    if isinstance(value, dict):
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is False:
                return Problem(f"{name}.{show(key)[1:-1]}", "is not implemented: leave it out")
            if isinstance(inner, dict) and (error := problem(item, inner, f"{name}.{show(key)[1:-1]}")):
                return error
        for key in schema.get("required", ()):
            if key not in value:
                return Problem(f"{name}.{key}", "is missing")
    return None


def same(value: Any, other: Any) -> bool:
    """Equal as JSON values: 1 is 1.0, but not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


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
    text = text if len(text) <= 80 else f"{text[:60]} ... {text[-12:]}"  # first: a text may have megabytes
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
