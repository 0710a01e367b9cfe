"""Checks a JSON schema before llguidance compiles it.

Contract: refuses by name what llguidance ignores although it restricts the answer, and what would make
its recursion too deep. What llguidance refuses itself is not listed here. Keywords that JSON Schema does not
know are annotations, as the specification says.
"""

import json
from collections.abc import Iterator
from typing import Any

from kvarn.errors import BadStructure
from kvarn.structured.structure import check_nesting

_MOST_LEVELS = 4000  # that llguidance may recurse through, with all references followed
_LARGEST_MULTIPLE = 100_000
_MOST_PATTERNS = 64  # in patternProperties: llguidance compares each with each

_ONE = ["additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"]
_ONE += ["propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"]
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

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
    n_patterns = 0
    for each in _subschemas(schema):
        for name, reason in _REFUSED.items():
            if name in each and each[name] is not False:
                raise BadStructure(f'{where} has "{name}", which cannot be enforced: {reason}')
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(each.get(name), bool):
                raise BadStructure(f"{where} has {name}: {json.dumps(each[name])} of draft 4: give a number")
        multiple = each.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > _LARGEST_MULTIPLE:
            raise BadStructure(f"{where} has multipleOf {multiple}: give at most {_LARGEST_MULTIPLE:,}")
        if isinstance(each.get("patternProperties"), dict):
            n_patterns += len(each["patternProperties"])
        if n_patterns > _MOST_PATTERNS:
            raise BadStructure(f"{where} has more than {_MOST_PATTERNS} patterns in patternProperties: use fewer")
        if isinstance(each.get("$ref"), str):
            targets.add(each["$ref"])
    levels = sum(_depth(_target(schema, ref)) for ref in targets)
    if levels > _MOST_LEVELS:
        raise BadStructure(f"{where} has too many references ($ref) to large parts: make it smaller")


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
