"""A tool's schema as rules of a grammar, in each form of arguments (dialect.py)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.lark import Lark
from kvarn.dialect.literals import KEY, MOST_NAME
from kvarn.dialect.tagged import as_json, kinds_of
from kvarn.dialect.ways import DEEPEST, NOTES, Ways, kinds_of_way, texts_of
from kvarn.errors import KvarnError

_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties"))
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# What JSON of a kind begins with, for a class of characters.
_OPENS = {"array": r"\[", "object": "{", "integer": "0-9\\-", "number": "0-9\\-", "boolean": "tfTF", "null": "nN"}


class Schemas:
    def __init__(self, dialect: Dialect, lark: Lark, tool: Tool, schema: object) -> None:
        """`schema` None: any arguments."""
        self._dialect = dialect
        self._lark = lark
        self._tool = tool
        self._any = schema is None
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._ways = Ways(self._root, self._refused)
        kind = self._root.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise self._refused("", f"type {json.dumps(kind)[:80]}")

    def whole(self) -> str:
        """The arguments as a JSON object."""
        if self._any:
            return self._lark.json({"type": "object"})
        root = dict(self._root)
        rest = root.keys() - NOTES - {"type", "properties"}
        if not root.get("properties") and rest <= {"additionalProperties"} and root.get("additionalProperties") is None:
            root |= _NO_ARGUMENTS
        return self._lark.json({**root, "type": "object"})

    def tagged(self) -> str:
        d, lark = self._dialect, self._lark
        if self._any:
            end = d.value[1].rstrip()
            free = lark.until(end, d.value[1][len(end) :])
            key = '/[^<>\\n"]{1,64}/'
            return f"({lark.text(d.key[0])} {key} {lark.text(d.key[1] + d.value[0])} {free})*"
        parts = []
        for key, schema, needed in self._properties(self._root, ""):
            self._check_key(key, not (d.key[1].strip() in key or key != key.strip() or len(key) > MOST_NAME))
            value = self._raw(schema, key)
            before = f"{lark.text(d.key[0])} {lark.plain(key)} {lark.text(d.key[1] + d.value[0])}"
            parts.append(lark.rule("argument", f"{before} {value}") + ("" if needed else "?"))
        return " ".join(parts)

    def _raw(self, schema: Any, key: str) -> str:
        """A value and its end marker: a text without quotes, or JSON. A text that would be read as JSON is none."""
        d, lark, where = self._dialect, self._lark, f".{key}"
        end = d.value[1].rstrip()
        rest = d.value[1][len(end) :]
        texts: list[str] = []
        others: list[Mapping[str, Any]] = []
        free = False  # a text may come
        for way in self._ways.of(schema, where):
            if not way:
                return lark.until(end, rest)
            if values := texts_of(way):
                texts += values
            elif way.get("type") == "string":
                self._check(way, frozenset(("type",)), where)
                free = True
            else:
                others.append(way)
        kinds = kinds_of(self._root, key)
        self._check_texts(texts, kinds, where)
        made = []
        if free:
            bound = [way for way in others if way.keys() != {"type"}]
            if any(not kinds_of_way(way) for way in bound):
                raise self._refused(where, f"{next(iter(bound[0]))} without a type beside a text")
            opens = "".join(sorted({_OPENS[kind] for way in bound for kind in kinds_of_way(way)}))
            first = f"/([^\\s\\x1c-\\x1f\\x85{opens}](.|\\n)*)?/"
            made.append(lark.until(end, rest, first) if bound else lark.until(end, rest))
        elif texts:
            made.append(f"{self._choices(texts)} {lark.text(d.value[1])}")
        if others:
            made.append(f"{self._in_json({'anyOf': others}, where)} {lark.text(d.value[1])}")
        return f"({' | '.join(made)})"

    def _check_texts(self, texts: Sequence[str], kinds: frozenset[str], where: str) -> None:
        """Refuse listed texts that cannot be read back."""
        d = self._dialect
        markers = [m.strip() for m in (d.value[1], d.key[0], d.call[1], d.section[1]) if m.strip()]
        for text in texts:
            if marker := next((marker for marker in markers if marker in text), ""):
                raise self._refused(where, f"a value with {marker!r} in it")
            if kinds != {"string"} and json.loads(as_json(text, kinds)) != text:
                raise self._refused(where, f"the text {text[:40]!r}, which would be read as another type,")

    def pythonic(self) -> str:
        if self._any:
            one = f'{_NAME} "=" {self._in_json({})}'
            return f'({one} (", " {one})*)?'
        parts = []
        for key, schema, needed in self._properties(self._root, ""):
            self._check_key(key, KEY.fullmatch(key) is not None)
            way = {} if isinstance(schema, bool) else {k: v for k, v in schema.items() if k not in NOTES}
            words = _words(way)
            value = f"({' | '.join(words)})" if words else self._in_json(way, f".{key}")
            parts.append((self._lark.rule("argument", f"{self._lark.plain(key + '=')} {value}"), needed))
        return self._listed(parts, '", "')

    def gemma(self) -> str:
        return self._gemma_object(None if self._any else self._root, "", 0)

    def _gemma(self, schema: Any, where: str, depth: int) -> str:
        if depth > DEEPEST:
            raise self._refused(where, f"more than {DEEPEST} levels")
        ways = [self._gemma_one(each, where, depth) for each in self._ways.of(schema, where)]
        return self._lark.rule("value", " | ".join(ways))

    def _gemma_one(self, way: Mapping[str, Any], where: str, depth: int) -> str:
        kind, values, mark = way.get("type"), texts_of(way), self._dialect.quote
        quote, text = self._lark.text(mark), self._lark.until(mark, "")
        if not way:
            return self._lark.rule("word", f"{quote} {text} | /[-+.A-Za-z0-9]{{1,40}}/")
        if values is not None:
            if any(mark in value for value in values):
                raise self._refused(where, f"a value with {mark!r} in it")
            return f"{quote} {self._choices(values)} {quote}"
        if kind == "string":
            self._check(way, frozenset(("type",)), where)
            return f"{quote} {text}"
        if kind == "array" or (kind is None and "items" in way):
            self._check(way, frozenset(("type", "items")), where)
            item = self._gemma(way.get("items", True), f"{where}[]", depth + 1)
            return self._lark.rule("list", f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object" or (kind is None and "enum" not in way):
            return self._gemma_object(way, where, depth)
        return self._in_json(way, where)

    def _gemma_object(self, schema: Mapping[str, Any] | None, where: str, depth: int) -> str:
        if schema is not None and not schema.keys() & {"properties", "required"}:
            self._check(schema, _ARGUMENTS, where)
            more = schema.get("additionalProperties", depth > 0)  # a tool without properties has no arguments
            if not isinstance(more, bool) and more != {}:
                raise self._refused(where, "additionalProperties with a schema")
            schema = {} if more is False else None
        if schema is None:
            one = f'{_NAME} ":" {self._gemma(True, where, depth + 1)}'
            return self._lark.rule("object", f'"{{" ({one} ("," {one})*)? "}}"')
        parts = []
        for key, each, needed in self._properties(schema, where):
            self._check_key(key, KEY.fullmatch(key) is not None and not key.startswith(self._dialect.quote))
            value = self._gemma(each, f"{where}.{key}", depth + 1)
            parts.append((self._lark.rule("argument", f"{self._lark.plain(f'{key}:')} {value}"), needed))
        comma = '","'
        return self._lark.rule("object", f'"{{" {self._listed(parts, comma)} "}}"')

    # -- parts -------------------------------------------------------------------------------------------------------

    def _properties(self, schema: Mapping[str, Any], where: str) -> list[tuple[str, Any, bool]]:
        """Key, schema, and whether it is required."""
        self._check(schema, _ARGUMENTS, where)
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(needed, list):
            raise self._refused(where, "properties that are not an object")
        for key in needed:
            if not isinstance(key, str) or key not in properties:
                raise self._refused(where, f"a required argument without a schema, {key!r},")
        for key, each in properties.items():
            if not isinstance(each, bool | Mapping) or (each is False and key in needed):
                raise self._refused(f"{where}.{key}", json.dumps(each)[:40])
        return [(key, each, key in needed) for key, each in properties.items() if each is not False]

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

    def _in_json(self, schema: Mapping[str, Any], where: str = "") -> str:
        """JSON with the definitions of the whole schema."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        whole = {**schema, **shared}
        self._ways.check_references(whole, where)
        return self._lark.json(whole)

    def _choices(self, values: Sequence[str]) -> str:
        texts = " | ".join(self._lark.plain(value) for value in values if value)
        return f"({texts}){'?' if '' in values else ''}" if texts else ""

    def _check(self, schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in NOTES:
                raise self._refused(where, keyword)

    def _check_key(self, key: str, readable: bool) -> None:
        if not key or not readable:
            raise self._refused("", f"an argument with the name {key[:40]!r}")

    def _refused(self, where: str, what: str) -> KvarnError:
        place = f"{self._tool.name}{where}"
        return KvarnError(
            f"tools: the format of this model's calls cannot honour {what} in the schema of {place}: remove it"
        )


def _words(schema: Mapping[str, Any]) -> list[str]:
    """Python's words for the values, if they are true and false only."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [True, False])
    if schema.get("type") != "boolean" or len(schema) > 2 or not isinstance(listed, list):
        return []
    if len(schema) == 2 and not schema.keys() & {"enum", "const"}:
        return []
    return [json.dumps(str(value)) for value in listed if isinstance(value, bool)]
