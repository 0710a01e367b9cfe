"""Structures: what their makers accept, and how they refuse."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from kvarn import SamplingParams
from kvarn.errors import BadStructure
from kvarn.structured import Structure, choice_of, grammar_of, regex_of, schema_of
from kvarn.structured.structure import MOST_BYTES, MOST_NESTING


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_is_a_dictionary_a_text_or_a_class_of_pydantic() -> None:
    schema = Person.model_json_schema()
    assert schema_of(Person) == schema_of(schema) == schema_of(json.dumps(schema, indent=3))
    assert json.loads(schema_of(Person).text) == schema


def test_a_class_without_a_schema_is_refused() -> None:
    class Odd(BaseModel):
        call: Callable[[], int]

    with pytest.raises(BadStructure, match="pydantic makes no JSON schema"):
        schema_of(Odd)


def test_the_order_of_properties_stays() -> None:
    schema = {"properties": {"z": {}, "a": {}}}
    assert list(json.loads(schema_of(schema).text)["properties"]) == ["z", "a"]


def test_a_grammar_with_definitions_of_gbnf_is_gbnf() -> None:
    assert grammar_of('root ::= "a"').kind == "gbnf"
    assert grammar_of('start: "a"').kind == "lark"


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        (schema_of, "{", "json_schema is not JSON"),
        (schema_of, "[1]", "json_schema is list"),
        (schema_of, 7, "json_schema is int"),
        (schema_of, {"minimum": float("nan")}, "json_schema is not JSON"),
        (schema_of, '{"minimum": NaN}', "json_schema is not JSON"),
        (schema_of, '{"minimum": 1e999}', "json_schema is not JSON"),
        (schema_of, {1: {}}, "a key is not a text"),
        (schema_of, {"enum": [object()]}, "json_schema is not JSON"),
        (schema_of, {"title": "x" * MOST_BYTES}, "bytes: give at most"),
        (schema_of, {"title": "\ud800"}, "lone surrogate"),
        (schema_of, nested(MOST_NESTING + 1), "nested more than"),
        (schema_of, "[" * 100_000, "nested more than"),
        (schema_of, {"allOf": [{}] * (MOST_BYTES + 1)}, "too many parts"),
        (regex_of, "", "regex must be a text that is not empty"),
        (regex_of, 3, "regex must be a text that is not empty"),
        (regex_of, "a" * (MOST_BYTES + 1), "bytes: give at most"),
        (choice_of, "abc", "choice must be a list of texts"),
        (choice_of, [], "choice must be a list of texts"),
        (choice_of, ["a", ""], "only texts that are not empty"),
        (choice_of, [1], "only texts"),
        (choice_of, [str(i) for i in range(20_000)], "give at most 10,000"),
        (grammar_of, b"start: a", "grammar must be a text"),
    ],
)
def test_bad_structures_are_refused_in_one_line(make: Any, value: Any, message: str) -> None:
    with pytest.raises(BadStructure, match=message) as refused:
        make(value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


def test_the_deepest_schema_is_accepted() -> None:
    assert schema_of(nested(MOST_NESTING)).kind == "json"


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadStructure, match="there is no structure 'xml'"):
        Structure("xml")


@pytest.mark.parametrize(
    ("settings", "structure"),
    [
        ({}, None),
        ({"json_schema": {"type": "null"}}, Structure("json", '{"type":"null"}')),
        ({"regex": "a+"}, Structure("regex", "a+")),
        ({"choice": ["a", "b", "a"]}, Structure("choice", '["a", "b"]')),
        ({"grammar": 'start: "a"'}, Structure("lark", 'start: "a"')),
    ],
)
def test_the_settings_of_an_answer_name_a_structure(settings: dict[str, Any], structure: Structure | None) -> None:
    assert SamplingParams(**settings).structure == structure


def test_the_settings_of_an_answer_name_at_most_one_structure() -> None:
    with pytest.raises(ValueError, match="regex and choice were given"):
        SamplingParams(regex="a", choice=["a"])
    with pytest.raises(BadStructure, match="json_schema is not JSON"):
        SamplingParams(json_schema="{")
