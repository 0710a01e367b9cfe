"""Structures from the fields of OpenAI's, vLLM's and llama.cpp's requests.

Contract: BadStructure names the field. Each function takes the value of one field; None means that the
answer is free. Non-goal: fields beside them.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvarn.errors import BadStructure
from kvarn.structured.structure import JSON_OBJECT, Structure, choice_of, grammar_of, regex_of, schema_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VLLM = {
    "json": schema_of,
    "regex": regex_of,
    "choice": choice_of,
    "grammar": grammar_of,
}


def from_response_format(value: Any, where: str = "response_format") -> Structure | None:
    """OpenAI's `response_format`, and llama.cpp's, whose json_object may have a `schema`."""
    if value is None:
        return None
    fields = _object(value, where)
    kind = fields.get("type")
    if kind == "text":
        _only(fields, where, "type")
        return None
    if kind == "json_object":
        _only(fields, where, "type", "schema")
        schema = fields.get("schema")
        return JSON_OBJECT if schema is None else schema_of(schema, f"{where}.schema")
    if kind == "json_schema":
        _only(fields, where, "type", "json_schema", "schema")
        if "json_schema" not in fields and "schema" in fields:  # llama.cpp's shape
            return schema_of(fields["schema"], f"{where}.schema")
        return _named_schema(fields.get("json_schema"), f"{where}.json_schema")
    raise BadStructure(f"{where}.type is {kind!r}: give text, json_object or json_schema")


def _named_schema(value: Any, where: str) -> Structure:
    fields = _object(value, where)
    _only(fields, where, "name", "description", "schema", "strict")
    name, strict = fields.get("name"), fields.get("strict")
    if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
        raise BadStructure(f"{where}.name is {name!r}: give 1 to 64 of the characters A-Z a-z 0-9 _ -")
    if not isinstance(strict, bool | None):
        raise BadStructure(f"{where}.strict is {strict!r}: give true or false; the schema is enforced in both cases")
    if fields.get("schema") is None:
        raise BadStructure(f"{where}.schema is missing: give a JSON schema")
    return schema_of(fields["schema"], f"{where}.schema")


def from_structured_outputs(value: Any, where: str = "structured_outputs") -> Structure | None:
    """vLLM's `structured_outputs`: exactly one of json, regex, choice, grammar and json_object."""
    if value is None:
        return None
    fields = {name: given for name, given in _object(value, where).items() if given is not None}
    _only(fields, where, *_VLLM, "json_object")
    if fields.get("json_object") is False:
        del fields["json_object"]
    if len(fields) != 1:
        known = ", ".join((*_VLLM, "json_object"))
        raise BadStructure(f"{where} has {len(fields)} of {known}: give exactly one")
    ((name, given),) = fields.items()
    if name == "json_object":
        if given is not True:
            raise BadStructure(f"{where}.json_object is {given!r}: give true")
        return JSON_OBJECT
    return _VLLM[name](given, f"{where}.{name}")


def from_json_schema(value: Any, where: str = "json_schema") -> Structure | None:
    """llama.cpp's `json_schema`."""
    return None if value is None else schema_of(value, where)


def from_gbnf(value: Any, where: str = "grammar") -> Structure | None:
    """llama.cpp's `grammar`; an empty one means that the answer is free. A text without `::=` is a Lark grammar."""
    return None if value is None or value == "" else grammar_of(value, where)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadStructure(f"{where} is {type(value).__name__}: give an object")
    return value


def _only(fields: Mapping[str, Any], where: str, *known: str) -> None:
    for name in fields:
        if name not in known:
            raise BadStructure(f"{where}.{name} is not known: there are {', '.join(known)}")
