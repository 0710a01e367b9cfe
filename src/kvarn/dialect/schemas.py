"""A tool's schema as rules of a grammar, in each form of arguments (dialect.py)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.lark import Lark
from kvarn.errors import KvarnError

DEEPEST = 16  # levels of a schema outside JSON
# Keywords that change nothing, or that the rules below honour.
_KNOWN = {
    *("type", "properties", "required", "items", "enum", "const", "additionalProperties", "$defs", "definitions"),
    *(
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    ),
}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Schemas:
    def __init__(self, dialect: Dialect, lark: Lark, tool: Tool, schema: object) -> None:
        """`schema` None: any arguments."""
        self._dialect = dialect
        self._lark = lark
        self._tool = tool
        self._any = schema is None
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}

    def whole(self) -> str:
        """The arguments as a JSON object."""
        if self._any:
            return self._lark.json({"type": "object"})
        root = dict(self._root)
        if not root.get("properties") and not {"$ref", "anyOf", "oneOf", "allOf"} & root.keys():
            root = {**_NO_ARGUMENTS, **({} if root.get("additionalProperties") is None else root)}
        return self._lark.json({"type": "object", **root})

    def tagged(self) -> str:
        d, text, parts = self._dialect, self._lark.text, []
        end = d.value[1].rstrip()
        after = d.value[1][len(end) :]
        for key, schema, needed in self._properties(self._root, ""):
            if self._is_text(schema):
                choices = self._choices(schema)
                value = f"{choices} {text(d.value[1])}" if choices else self._lark.until(end, after)
            else:
                value = f"{self._in_json(schema)} {text(d.value[1])}"
            one = self._lark.rule("argument", f"{text(d.key[0] + key + d.key[1] + d.value[0])} {value}")
            parts.append(one if needed else f"{one}?")
        if self._any:
            name = '/[^<>\\n"]{1,64}/'
            value = self._lark.until(end, after)
            parts = [f"({text(d.key[0])} {name} {text(d.key[1] + d.value[0])} {value})*"]
        return " ".join(parts)

    def pythonic(self) -> str:
        if self._any:
            one = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {self._in_json({})}'
            return f'({one} (", " {one})*)?'
        parts = []
        for key, schema, needed in self._properties(self._root, ""):
            kind = schema.get("type")
            value = '("True" | "False")' if kind == "boolean" else self._in_json(schema)
            parts.append((self._lark.rule("argument", f"{self._lark.text(key + '=')} {value}"), needed))
        return self._listed(parts, '", "')

    def gemma(self) -> str:
        return self._gemma_any() if self._any else self._gemma(self._root, "", 0)

    def _gemma_any(self) -> str:
        key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
        quote = self._lark.text(self._dialect.quote)
        word = self._lark.rule(
            "word", f"{quote} {self._lark.until(self._dialect.quote, '')} | /[-+.A-Za-z0-9]{{1,40}}/"
        )
        one = f'{key} ":" {word}'
        return f'"{{" ({one} ("," {one})*)? "}}"'

    def _gemma(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if depth > DEEPEST:
            raise self._refused(where, "more than 16 levels")
        kind = schema.get("type")
        if depth == 0 or kind == "object":
            parts = [
                (
                    self._lark.rule(
                        "argument", f"{self._lark.text(f'{key}:')} {self._gemma(each, f'{where}.{key}', depth + 1)}"
                    ),
                    needed,
                )
                for key, each, needed in self._properties(schema, where)
            ]
            return self._lark.rule("object", f'"{{" {self._listed(parts, chr(34) + "," + chr(34))} "}}"')
        self._check(schema, where)
        quote = self._lark.text(self._dialect.quote)
        if kind == "array":
            item = self._gemma(schema.get("items", {"type": "string"}), f"{where}[]", depth + 1)
            return self._lark.rule("list", f'"[" ({item} ("," {item})*)? "]"')
        if self._is_text(schema):
            choices = self._choices(schema)
            return self._lark.rule(
                "text",
                f"{quote} {choices} {quote}" if choices else f"{quote} {self._lark.until(self._dialect.quote, '')}",
            )
        if kind in ("integer", "number", "boolean", "null"):
            return self._in_json(schema)
        raise self._refused(where, f"type {json.dumps(kind)}")

    # -- parts -------------------------------------------------------------------------------------------------------

    def _properties(self, schema: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Key, schema, and whether it is required."""
        if self._any:
            return []
        self._check(schema, where)
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(needed, Sequence):
            raise self._refused(where, "properties that are not an object")
        for key in needed:
            if key not in properties:
                raise self._refused(where, f"a required argument without a schema: {key!r}")
        return [(key, each if isinstance(each, Mapping) else {}, key in needed) for key, each in properties.items()]

    def _listed(self, parts: list[tuple[str, bool]], separator: str) -> str:
        """The parts in order with separators. Those that are not required may be left out."""
        after = ""  # what may follow when something came before
        tails = [""]
        for part, needed in reversed(parts):
            after = f"{separator} {part} {after}" if needed else f"({separator} {part})? {after}"
            tails.append(after)
        tails.reverse()
        choices = []
        for (part, needed), tail in zip(parts, tails[1:], strict=True):
            choices.append(f"{part} {tail}")
            if needed:
                return f"({' | '.join(choices)})"
        return f"({' | '.join(choices)})?" if choices else ""

    def _in_json(self, schema: Mapping[str, Any]) -> str:
        """JSON with the definitions of the whole schema."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.json({**shared, **schema})

    def _is_text(self, schema: Mapping[str, Any]) -> bool:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        texts = bool(values) and all(isinstance(value, str) for value in values)
        if not (schema.get("type") == "string" or texts):
            return False
        self._check(schema, "")
        return True

    def _choices(self, schema: Mapping[str, Any]) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return f"({' | '.join(self._lark.text(value) for value in values if value)})" if values else ""

    def _check(self, schema: Mapping[str, Any], where: str) -> None:
        for keyword in schema:
            if keyword not in _KNOWN:
                raise self._refused(where, keyword)

    def _refused(self, where: str, what: str) -> KvarnError:
        place = f"{self._tool.name}{where}"
        return KvarnError(
            f"tools: the format of this model's calls cannot honour {what} in the schema of {place}: remove it"
        )
