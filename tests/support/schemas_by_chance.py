"""Random JSON schemas of the keywords that kvarn enforces."""

import random
from typing import Any

FORMATS = ("uuid", "ipv4")  # of the others, kvarn checks the form and a validator the calendar and lengths, too
PATTERNS = ("^[a-z]{2,4}$", "^(ab|cd)+$", "[0-9]{2}")


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    makers = [_text, _number, _integer, _constant, _enumeration, _simple, _pattern]
    if depth:
        makers += [_array, _tuple, _object, _object, _map, _any, _all]
    return rng.choice(makers)(rng, depth - 1)


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50) / 2
    names = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "number", names[0]: low, names[1]: low + rng.randrange(1, 40)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "integer", "multipleOf": rng.randrange(1, 30), "minimum": 0, "maximum": 10_000}
    low = rng.randrange(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(500)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([None, True, 7, "seven", [1, {"a": "b"}], {"x": [2]}])}


def _enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 3, -4.5, None, False, ["a"], {"b": 1}], rng.randrange(1, 5))}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {"type": "array", "items": schema(rng, depth), "minItems": least, "maxItems": least + rng.randrange(3)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [schema(rng, depth) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randrange(len(parts) + 1)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "id", 'q"', "name", "été", "x y"], rng.randrange(1, 5))
    needed = rng.sample(names, rng.randrange(len(names) + 1))
    parts = {name: schema(rng, depth) for name in names}
    return {"type": "object", "properties": parts, "required": needed, "additionalProperties": False}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(2)
    return {
        "type": "object",
        "additionalProperties": schema(rng, depth),
        "minProperties": least,
        "maxProperties": least + rng.randrange(2),
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth) for _ in range(rng.randrange(1, 4))]}


def _all(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = schema(rng, depth)
    return {"$defs": {"part": inner}, "allOf": [{"$ref": "#/$defs/part"}, {}]}
