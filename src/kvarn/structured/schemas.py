"""Checks a JSON schema before llguidance compiles it.

Contract: refuses by name what llguidance ignores although it restricts the answer, and what would make
its recursion too deep. What llguidance refuses itself is not listed here. Keywords that JSON Schema does not
know are annotations, as the specification says.
"""

import copy
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kvarn.errors import BadStructure
from kvarn.structured.structure import check_nesting

_MOST_LEVELS = 4000  # that llguidance may recurse through, with all references followed
_LARGEST_MULTIPLE = 100_000
_EXACT = 2**53
_MOST_PATTERNS = 64  # in patternProperties: llguidance compares each with each

_ONE = ["additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"]
_ONE += ["propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"]
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

_COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
_ANNOTATIONS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
_ANNOTATIONS |= {"examples", "readOnly", "title", "writeOnly"}

# Keywords that llguidance does not look at, but that restrict an answer in some version of JSON Schema or OpenAPI.
_REFUSED = {
    "x-guidance": "kvarn sets it itself",
    "nullable": 'it is not JSON Schema; give "type": [..., "null"]',
    "disallow": "it is of an old draft; use another keyword",
    "divisibleBy": "it is of an old draft; use multipleOf",
    "extends": "it is of an old draft; use allOf",
}


def check_schema(schema: Any, where: str) -> None:
    check_nesting(schema, where)
    targets: set[str] = set()
    multiples: set[float] = set()
    combined = False
    n_patterns = 0
    for each in _subschemas(schema):
        for name, reason in _REFUSED.items():
            if name in each and each[name] is not False:
                raise BadStructure(f'{where} has "{name}", which cannot be enforced: {reason}')
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(each.get(name), bool):
                raise BadStructure(f"{where} has {name}: {json.dumps(each[name])} of draft 4: give a number")
        _check_numbers(each, where)
        multiple = each.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            multiples.add(multiple)
        combined = combined or _combines(each)
        if isinstance(each.get("patternProperties"), dict):
            n_patterns += len(each["patternProperties"])
        if n_patterns > _MOST_PATTERNS:
            raise BadStructure(f"{where} has more than {_MOST_PATTERNS} patterns in patternProperties: use fewer")
        if isinstance(each.get("$ref"), str):
            targets.add(each["$ref"])
    _check_multiples(multiples, combined, where)
    levels = sum(_depth(_target(schema, ref)) for ref in targets)
    if levels > _MOST_LEVELS:
        raise BadStructure(f"{where} has too many references ($ref) to large parts: make it smaller")


def _check_numbers(schema: dict[str, Any], where: str) -> None:
    """llguidance reads numbers as float64."""
    instead = "numbers beyond 2^53 are not exact; check it in your program"
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(limit := schema.get(name), int | float) and abs(limit) > _EXACT:
            raise BadStructure(f"{where} has {name} {limit}, which cannot be enforced: {instead}")
    for name in ("const", "enum"):
        left = [schema.get(name)]
        while left:
            each = left.pop()
            if isinstance(each, int) and abs(each) > _EXACT:
                raise BadStructure(f"{where} has {name} with {each}, which cannot be enforced: {instead}")
            left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def simplified(schema: dict[str, Any]) -> dict[str, Any]:
    """Without keywords that llguidance refuses although they do not restrict an answer."""
    schema = copy.deepcopy(schema)
    for each in _subschemas(schema):
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]
    return schema


def _combines(schema: dict[str, Any]) -> bool:
    """Whether an answer must follow several schemas at once, also if only their parts have restrictions."""
    parts = sum(len(schema[name]) if name == "allOf" else 1 for name in _COMBINING if schema.get(name))
    return parts + bool(schema.keys() - _COMBINING - _ANNOTATIONS) > 1


def _check_multiples(multiples: set[float], combined: bool, where: str) -> None:
    """llguidance's automaton has a state for each remainder: of each multipleOf, or of all that are combined."""
    exact = [abs(Decimal(repr(each))) for each in multiples if each]
    for each in exact:
        if int(each.scaleb(_places(each))) > _LARGEST_MULTIPLE:
            few = f"give at most {_LARGEST_MULTIPLE:,}, or fewer digits"
            raise BadStructure(f"{where} has multipleOf {float(each):g}: {few}")
    most_places = max(map(_places, exact), default=0)
    if combined and math.lcm(*(int(each.scaleb(most_places)) for each in exact)) > _LARGEST_MULTIPLE:
        reason = f"with allOf, $ref or anyOf their least common multiple must be at most {_LARGEST_MULTIPLE:,}"
        raise BadStructure(f"{where} has several multipleOf: {reason}")


def _places(number: Decimal) -> int:
    """Digits after the point."""
    exponent = number.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    left = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        yield each
        left += [each[name] for name in _ONE if name in each]
        for name in _LISTS:
            if isinstance(each.get(name), list):
                left += each[name]
        for name in _MAPS:
            if isinstance(each.get(name), dict):
                left += each[name].values()


def _target(schema: Any, ref: str) -> Any:
    """What a reference into the schema points to. The whole schema, if it is not found by its path."""
    if not ref.startswith("#/"):
        return schema
    found = schema
    for part in ref[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return schema
        found = found[key]
    return found


def _depth(value: Any) -> int:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return depth
