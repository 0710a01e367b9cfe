"""The fields of OpenAI's, vLLM's and llama.cpp's requests."""

from typing import Any

import pytest

from kvarn.errors import BadStructure
from kvarn.structured import (
    JSON_OBJECT,
    Structure,
    from_gbnf,
    from_json_schema,
    from_response_format,
    from_structured_outputs,
)

SCHEMA = {"type": "integer"}
MADE = Structure("json", '{"type":"integer"}')


@pytest.mark.parametrize(
    ("value", "structure"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, JSON_OBJECT),
        ({"type": "json_object", "schema": SCHEMA}, MADE),
        ({"type": "json_schema", "schema": SCHEMA}, MADE),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}, MADE),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": None}}, MADE),
    ],
)
def test_response_format(value: Any, structure: Structure | None) -> None:
    assert from_response_format(value) == structure


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("json", "response_format is str"),
        ({}, "response_format.type is None"),
        ({"type": "xml"}, "response_format.type is 'xml'"),
        ({"type": "text", "schema": {}}, "response_format.schema is not known"),
        ({"type": "json_schema"}, "response_format.json_schema is NoneType"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "json_schema.name is 'a b'"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}, "json_schema.strict is 1"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}, "json_schema.extra is not known"),
        ({"type": "json_object", "schema": 3}, "response_format.schema is int"),
    ],
)
def test_response_format_names_the_field_that_is_wrong(value: Any, message: str) -> None:
    with pytest.raises(BadStructure, match=message):
        from_response_format(value)


@pytest.mark.parametrize(
    ("value", "structure"),
    [
        (None, None),
        ({"json": SCHEMA}, MADE),
        ({"json": '{"type": "integer"}', "regex": None}, MADE),
        ({"regex": "a"}, Structure("regex", "a")),
        ({"choice": ["a"]}, Structure("choice", '["a"]')),
        ({"grammar": 'root ::= "a"'}, Structure("gbnf", 'root ::= "a"')),
        ({"json_object": True}, JSON_OBJECT),
    ],
)
def test_structured_outputs(value: Any, structure: Structure | None) -> None:
    assert from_structured_outputs(value) == structure


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "structured_outputs is list"),
        ({}, "has 0 of json, regex"),
        ({"json_object": False}, "has 0 of json, regex"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": "a", "json": {}}, "has 2 of json, regex"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag is not known"),
        ({"regex": 1}, "structured_outputs.regex must be a text"),
    ],
)
def test_structured_outputs_names_the_field_that_is_wrong(value: Any, message: str) -> None:
    with pytest.raises(BadStructure, match=message):
        from_structured_outputs(value)


def test_the_fields_of_llama_cpp() -> None:
    assert from_gbnf(None) is from_gbnf("") is from_json_schema(None) is None
    assert from_gbnf('root ::= "a"') == Structure("gbnf", 'root ::= "a"')
    assert from_json_schema(SCHEMA) == MADE
    with pytest.raises(BadStructure, match="grammar must be a text"):
        from_gbnf(["a"])
