"""Reads arguments that are written in tags, and writes them as JSON while they come.

A text is written as it is. The tool's schema says which arguments are texts; the others are JSON. The parser does not
check values against the schema: a value that is not JSON where JSON is expected becomes a text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.json_text import ENDS, Out, quoted
from kvarn.dialect.literals import MOST_NAME
from kvarn.dialect.source import Broken, Source, Steps, longest_first

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ANY = frozenset((*KINDS.values(), "null"))


class Tagged:
    def __init__(self, dialect: Dialect, source: Source) -> None:
        self._source = source
        self._key = tuple(marker.strip() for marker in dialect.key)
        self._value = tuple(marker.strip() for marker in dialect.value)
        self._ends = longest_first(dialect.call[1], dialect.section[1])
        self._next = longest_first(dialect.key[0], dialect.call[1], dialect.section[1])
        self._lines = (dialect.key[1] + dialect.value[0]).endswith("\n")  # a value has lines of its own
        first = re.escape(self._value[1][:1])
        self._plain = re.compile(rf"[^\n{first}]+")

    def arguments(self, tool: Tool, out: Out) -> Steps[None]:
        """From after the name to before the end marker."""
        source = self._source
        out("{")
        seen: set[str] = set()
        while True:
            yield from source.spaces()
            if (yield from source.begins(self._ends)):
                out("}")
                return
            yield from source.expect(self._key[0])
            key = yield from self._name()
            if key in seen:
                raise Broken(f"the argument {key[:40]!r} comes twice")
            out(f'{", " if seen else ""}"{quoted(key)}": ')
            seen.add(key)
            kinds = kinds_of(tool.parameters, key)
            if self._value[0]:
                yield from source.spaces()
                yield from source.expect(self._value[0])
            if kinds == {"string"}:
                out('"')
                yield from self._text(lambda text: out(quoted(text)))
                out('"')
            else:
                parts: list[str] = []
                yield from self._text(parts.append)
                out(as_json("".join(parts), kinds))

    def _name(self) -> Steps[str]:
        name = ""
        while not (yield from self._source.take(self._key[1])):
            if len(name) > MOST_NAME or not (yield from self._source.more()):
                raise Broken(f"a name has more than {MOST_NAME} characters" if name[MOST_NAME:] else ENDS)
            name += self._source.text[self._source.at]
            self._source.at += 1
        return name.strip()

    def _text(self, out: Out) -> Steps[None]:
        """A value and its end marker. An end marker counts only if the next argument or the call's end follows."""
        source, end = self._source, self._value[1]
        if self._lines:
            yield from source.take("\n")
        line_end = ""  # may be the last one, which is not a part of the value
        while (yield from source.more()):
            if run := source.run(self._plain):
                out(line_end + run)
                line_end = ""
            elif (yield from source.take(end)):
                space = yield from source.spaces()
                if (yield from source.begins(self._next)) or not (yield from source.more()):
                    out("" if self._lines else line_end)
                    return
                out(line_end + end + space)
                line_end = ""
            else:
                out(line_end)
                line_end = source.text[source.at]
                source.at += 1
                if line_end != "\n":
                    out(line_end)
                    line_end = ""
        raise Broken(ENDS)


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that the schema allows for an argument."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(found, schema) or _ANY


def _kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Empty: the schema does not say."""
    kinds: set[str] = set()
    followed: set[str] = set()
    left = [schema]
    while left:
        each = left.pop()
        kind = each.get("type") if isinstance(each, Mapping) else None
        if not isinstance(each, Mapping):
            return frozenset()
        values = each.get("enum", [each["const"]] if "const" in each else None)
        parts = each.get("anyOf", each.get("oneOf"))
        if isinstance(kind, str | list):
            kinds |= {name for name in ([kind] if isinstance(kind, str) else kind) if isinstance(name, str)}
        elif isinstance(values, list):
            kinds |= {KINDS.get(type(value), "null") for value in values}
        elif isinstance(ref := each.get("$ref"), str):
            left += [] if ref in followed else [referred(ref, root)]
            followed.add(ref)
        elif isinstance(parts, list) and parts:
            left += parts
        else:
            return frozenset()
    return frozenset(kinds)


def referred(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in ref.removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """The value as JSON text: as it is if it is JSON of one of these types, else as a text."""
    bare = text.strip()
    if bare in ("True", "False") and "boolean" in kinds:
        return bare.lower()
    if bare == "None" and ("null" in kinds or "string" not in kinds):
        return "null"
    try:
        value = json.loads(bare, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    kind = KINDS.get(type(value), "null")
    fits = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
    return f'"{quoted(text)}"' if "string" in kinds and not fits else bare


def _no_constant(name: str) -> Any:
    raise ValueError(name)
