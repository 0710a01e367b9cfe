"""A schema as a choice of simple schemas, each with values of one kind, for formats that are not JSON.

Contract: a value that follows one of the ways follows the schema. What would not hold is refused by name.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvarn.dialect.tagged import KINDS, referred
from kvarn.errors import KvarnError

DEEPEST = 16  # levels of a schema outside JSON
MOST_PARTS = 10_000  # of a schema, with all references followed
# Keywords that change nothing.
NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"),
        *("writeOnly", "$defs", "definitions"),
    )
)
_OF_CONTAINERS = frozenset(("properties", "required", "additionalProperties", "items"))

Schema = Mapping[str, Any]
Refused = Callable[[str, str], KvarnError]  # (where, what)


class Ways:
    def __init__(self, root: Schema, refused: Refused) -> None:
        self._root = root
        self._refused = refused
        self._left = MOST_PARTS

    def of(self, schema: Any, where: str, depth: int = 0) -> list[Schema]:
        """Each is {} (anything), has one type and perhaps other keywords, or has only keywords of containers. Values
        are listed in `enum`, all of them texts or none."""
        self._left -= 1
        if self._left < 0:
            raise self._refused(where, f"more than {MOST_PARTS:,} parts")
        if depth > DEEPEST:
            raise self._refused(where, "references without end")
        if schema is True:
            return [{}]
        if not isinstance(schema, Mapping):
            raise self._refused(where, json.dumps(schema)[:40])
        schema = {key: value for key, value in schema.items() if key not in NOTES}
        if "enum" in schema or "const" in schema:
            return self._listed(schema, where)
        kinds = self._kinds(schema, where)
        if kinds is not None and "string" not in kinds:
            return [{**schema, "type": kind} for kind in kinds]
        for word in ("$ref", "anyOf", "oneOf"):
            if word in schema:
                return self._followed(word, schema, where, depth)
        if kinds is not None:
            return [{**schema, "type": kind} for kind in kinds]
        self._only(schema, _OF_CONTAINERS, where)
        return [schema]

    def _followed(self, word: str, schema: Schema, where: str, depth: int) -> list[Schema]:
        if others := [key for key in schema if key != word]:
            raise self._refused(where, f"{others[0]} beside {word}")
        if word == "$ref":
            ref = schema[word]
            if not isinstance(ref, str) or not ref.startswith("#/") or referred(ref, self._root) is None:
                raise self._refused(where, f"$ref {json.dumps(ref)[:80]}")
            return self.of(referred(ref, self._root), where, depth + 1)
        if not isinstance(schema[word], list) or not schema[word]:
            raise self._refused(where, word)
        parts = [self.of(part, where, depth + 1) for part in schema[word]]
        if word == "oneOf" and not _apart(parts):
            raise self._refused(where, "oneOf whose parts may overlap")
        return [way for part in parts for way in part]

    def _listed(self, schema: Schema, where: str) -> list[Schema]:
        """Listed values, texts apart from others."""
        kinds = self._kinds(schema, where)
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if not isinstance(values, list) or ("enum" in schema and "const" in schema):
            raise self._refused(where, "enum")
        rest = {key: value for key, value in schema.items() if key not in ("enum", "const", "type")}
        if rest:
            raise self._refused(where, f"{next(iter(rest))} beside {'enum' if 'enum' in schema else 'const'}")
        values = [value for value in values if kinds is None or _fits(value, kinds)]
        if not values:
            raise self._refused(where, "values none of which has the type")
        split = ([v for v in values if isinstance(v, str)], [v for v in values if not isinstance(v, str)])
        return [{"enum": each} for each in split if each]

    def _kinds(self, schema: Schema, where: str) -> list[str] | None:
        kind = schema.get("type")
        if kind is None and "type" not in schema:
            return None
        kinds = [kind] if isinstance(kind, str) else kind
        if not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) and _known(k) for k in kinds):
            raise self._refused(where, f"type {json.dumps(kind)[:80]}")
        return kinds

    def _only(self, schema: Schema, known: frozenset[str], where: str) -> None:
        for keyword in schema:
            if keyword not in known:
                raise self._refused(where, keyword)

    def check_references(self, schema: Any, where: str) -> None:
        """Refuse references that do not lead to definitions: the schema is taken out of the whole one."""
        for ref in _references(schema):
            if not ref.startswith(("#/$defs/", "#/definitions/")):
                raise self._refused(where, f"$ref {json.dumps(ref)[:80]}")


def texts_of(way: Schema) -> list[str] | None:
    """The texts that it allows, if they are listed."""
    values = way.get("enum")
    return values if isinstance(values, list) and isinstance(values[0], str) else None


def kinds_of_way(way: Schema) -> frozenset[str]:
    """Empty: all."""
    if "enum" in way:
        return frozenset(KINDS.get(type(value), "null") for value in way["enum"])
    return frozenset((way["type"],)) if "type" in way else frozenset()


def _known(kind: str) -> bool:
    return kind in KINDS.values() or kind == "null"


def _fits(value: Any, kinds: list[str]) -> bool:
    kind = KINDS.get(type(value), "null")
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _apart(parts: list[list[Schema]]) -> bool:
    """Whether no value follows two of them."""
    whole: dict[str, int] = {}  # the part that has any value of a kind
    listed: dict[str, tuple[int, str]] = {}  # the part that lists a value, and its kind
    for i, part in enumerate(parts):
        for way in part:
            if not (kinds := kinds_of_way(way)):
                return len(parts) == 1
            if "enum" not in way and any(whole.setdefault(_wide(kind), i) != i for kind in kinds):
                return False
            for value in way.get("enum", ()):
                kind = _wide(KINDS.get(type(value), "null"))
                if listed.setdefault(_text(value), (i, kind))[0] != i:
                    return False
    return all(whole.get(kind, i) == i for i, kind in listed.values())


def _wide(kind: str) -> str:
    """Every integer is a number."""
    return "number" if kind == "integer" else kind


def _text(value: Any) -> str:
    """The same for equal values: 1 and 1.0 are."""
    number = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if number else value, sort_keys=True)


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            left += each.values()
        elif isinstance(each, list):
            left += each
