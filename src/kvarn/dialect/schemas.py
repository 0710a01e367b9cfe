"""A tool's schema as rules of a grammar, in each form of arguments (dialect.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.lark import Lark
from kvarn.dialect.tagged import referred
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
_TYPED = {"type", "enum", "const", "properties", "items"}  # one of them says what kind of value it is
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
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
        d, lark = self._dialect, self._lark
        end = d.value[1].rstrip()
        free = lark.until(end, d.value[1][len(end) :])
        if self._any:
            key = '/[^<>\\n"]{1,64}/'
            return f"({lark.text(d.key[0])} {key} {lark.text(d.key[1] + d.value[0])} {free})*"
        parts = []
        for key, schema, needed in self._properties(self._root, ""):
            value = self._raw(schema, f".{key}")
            value = free if value is None else f"{value} {lark.text(d.value[1])}"
            before = f"{lark.text(d.key[0])} {lark.plain(key)} {lark.text(d.key[1] + d.value[0])}"
            parts.append(lark.rule("argument", f"{before} {value}") + ("" if needed else "?"))
        return " ".join(parts)

    def _raw(self, schema: Mapping[str, Any], where: str) -> str | None:
        """A text without quotes, or JSON. None: any text."""
        texts, others = [], []
        for each in self._alternatives(schema, where):
            if not _TYPED & each.keys():
                return None
            values = _texts(each)
            if each.get("type") != "string" and values is None:
                others.append(each)
                continue
            self._check(each, where)
            if values is None:
                return None
            texts += values
        choices = [self._choices(texts)] if texts else []
        return f"({' | '.join([*choices, *([self._in_json({'anyOf': others})] if others else [])])})"

    def pythonic(self) -> str:
        if self._any:
            one = f'{_NAME} "=" {self._in_json({})}'
            return f'({one} (", " {one})*)?'
        parts = []
        for key, schema, needed in self._properties(self._root, ""):
            value = '("True" | "False")' if schema.get("type") == "boolean" else self._in_json(schema)
            parts.append((self._lark.rule("argument", f"{self._lark.plain(key + '=')} {value}"), needed))
        return self._listed(parts, '", "')

    def gemma(self) -> str:
        return self._gemma_object(None if self._any else self._root, "", 0)

    def _gemma(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if depth > DEEPEST:
            raise self._refused(where, f"more than {DEEPEST} levels")
        ways = [self._gemma_one(each, where, depth) for each in self._alternatives(schema, where)]
        return self._lark.rule("value", " | ".join(ways))

    def _gemma_one(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        kind, values = schema.get("type"), _texts(schema)
        quote, text = self._lark.text(self._dialect.quote), self._lark.until(self._dialect.quote, "")
        if not _TYPED & schema.keys():
            return self._lark.rule("word", f"{quote} {text} | /[-+.A-Za-z0-9]{{1,40}}/")
        self._check(schema, where)
        if kind == "string" or values is not None:
            return f"{quote} {text}" if values is None else f"{quote} {self._choices(values)} {quote}"
        if kind == "object" or "properties" in schema:
            return self._gemma_object(schema if "properties" in schema else None, where, depth)
        if kind == "array":
            item = self._gemma(schema.get("items", {}), f"{where}[]", depth + 1)
            return self._lark.rule("list", f'"[" ({item} ("," {item})*)? "]"')
        return self._in_json(schema)

    def _gemma_object(self, schema: Mapping[str, Any] | None, where: str, depth: int) -> str:
        if schema is None:
            one = f'{_NAME} ":" {self._gemma({}, where, depth + 1)}'
            return self._lark.rule("object", f'"{{" ({one} ("," {one})*)? "}}"')
        parts = []
        for key, each, needed in self._properties(schema, where):
            value = self._gemma(each, f"{where}.{key}", depth + 1)
            parts.append((self._lark.rule("argument", f"{self._lark.plain(f'{key}:')} {value}"), needed))
        comma = '","'
        return self._lark.rule("object", f'"{{" {self._listed(parts, comma)} "}}"')

    # -- parts -------------------------------------------------------------------------------------------------------

    def _properties(self, schema: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Key, schema, and whether it is required."""
        self._check(schema, where)
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(needed, Sequence):
            raise self._refused(where, "properties that are not an object")
        for key in needed:
            if key not in properties:
                raise self._refused(where, f"a required argument without a schema, {key!r},")
        return [(key, each if isinstance(each, Mapping) else {}, key in needed) for key, each in properties.items()]

    def _alternatives(self, schema: Any, where: str, depth: int = 0) -> list[Mapping[str, Any]]:
        """Schemas without references and without a choice of types."""
        if not isinstance(schema, Mapping):
            return [{}]
        if depth > DEEPEST:
            raise self._refused(where, "references without end")
        if isinstance(ref := schema.get("$ref"), str):
            return self._alternatives(referred(ref, self._root), where, depth + 1)
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return [each for part in schema[word] for each in self._alternatives(part, where, depth + 1)]
        values = schema.get("enum")
        if isinstance(values, list) and _texts(schema) is None:
            kinds = ([v for v in values if isinstance(v, str)], [v for v in values if not isinstance(v, str)])
            return [{"enum": kind} for kind in kinds if kind]
        if isinstance(schema.get("type"), list) and values is None:
            return [{**schema, "type": kind} for kind in schema["type"]]
        return [schema]

    def _listed(self, parts: list[tuple[str, bool]], separator: str) -> str:
        """The parts in order with separators. Those that are not required may be left out."""
        after = ""  # what may follow when something came before
        ways: list[str] = []
        for part, needed in reversed(parts):
            ways = [f"{part} {after}"] if needed else [f"{part} {after}", *ways]
            this = f"{separator} {part}" if needed else f"({separator} {part})?"
            after = self._lark.rule("more", f"{this} {after}".strip())
        optional = not any(needed for _, needed in parts)
        return f"({' | '.join(ways)}){'?' if optional else ''}" if ways else ""

    def _in_json(self, schema: Mapping[str, Any]) -> str:
        """JSON with the definitions of the whole schema."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.json({**shared, **schema})

    def _choices(self, values: Sequence[str]) -> str:
        texts = " | ".join(self._lark.plain(value) for value in values if value)
        return f"({texts}){'?' if '' in values else ''}" if texts else ""

    def _check(self, schema: Mapping[str, Any], where: str) -> None:
        for keyword in schema:
            if keyword not in _KNOWN:
                raise self._refused(where, keyword)

    def _refused(self, where: str, what: str) -> KvarnError:
        place = f"{self._tool.name}{where}"
        return KvarnError(
            f"tools: the format of this model's calls cannot honour {what} in the schema of {place}: remove it"
        )


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that it allows, if they are listed."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values and all(isinstance(each, str) for each in values) else None
