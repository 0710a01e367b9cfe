"""Every schema of an argument is enforced or refused: an independent validator checks what the grammars accept."""

from typing import Any

import jsonschema_rs
import pytest
from dialect.test_grammar import accepts
from support.dialect_samples import DIALECTS, said
from support.dialect_writer import written

from kvarn.dialect import Parser, Tool, grammar, joined
from kvarn.dialect.lark import Lark
from kvarn.dialect.schemas import Schemas
from kvarn.errors import KvarnError

FORMS = ("hermes", "mistral", "qwen3-coder", "glm", "gemma4", "lfm2")
DEFS = {
    "text": {"type": "string"},
    "small": {"type": "integer", "maximum": 5},
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "list": {"type": "array", "items": {"type": "integer"}},
}
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
ENFORCED: list[Any] = [  # in every form
    *(TEXT, WHOLE, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": "array", "items": WHOLE}),
    *({"enum": ["a", "b"]}, {"const": "a"}, {"const": 3}, {"enum": ["a", 3, None]}, {"type": ["integer", "null"]}),
    *({"type": "integer", "enum": ["zzzz", 1]}, {"type": "string", "enum": ["a", 1]}, {"type": "number", "enum": [1]}),
    *({"$ref": "#/$defs/small"}, {"$ref": "#/$defs/small", "title": "t"}, {"$ref": "#/$defs/point"}),
    *({"anyOf": [WHOLE, {"type": "null"}], "default": None}, {"anyOf": [TEXT, {"$ref": "#/$defs/list"}]}),
    *({"anyOf": [TEXT, {"$ref": "#/$defs/small"}]}, {"anyOf": [TEXT, {"$ref": "#/$defs/point"}]}),
    *(
        {"anyOf": [TEXT, {"const": True}]},
        {"oneOf": [TEXT, {"type": "null"}]},
        {"oneOf": [{"const": "a"}, {"const": 3}]},
    ),
    *({"type": "boolean", "const": True}, {"type": "boolean", "enum": [False]}, {"type": "integer", "minimum": 3}),
    *({}, {"title": "t"}, {"type": ["string", "integer"]}, {"properties": {"x": WHOLE}}, {"type": "object"}),
    {"type": "object", "additionalProperties": False},
]
HARD: list[Any] = [  # enforced in some forms
    *({"pattern": "^a"}, {"maxLength": 1}, {"type": "string", "maxLength": 1}, {"minLength": 3}, {"format": "date"}),
    *({"allOf": [TEXT, {"maxLength": 1}]}, {"allOf": [{"minimum": 3}]}, {"type": "integer", "allOf": [{"minimum": 3}]}),
    *({"$ref": "#/$defs/text", "maxLength": 1}, {"$ref": "#/$defs/small", "minimum": 2}),
    *({"$ref": "#/$defs/text", "enum": ["a"]}, {"$ref": "#/$defs/none"}, {"$ref": "#"}, {"$ref": "#/properties/v"}),
    *({"anyOf": [TEXT, WHOLE], "enum": ["a", 3]}, {"type": "string", "anyOf": [{"const": "a"}, {"const": "b"}]}),
    *({"anyOf": [TEXT, WHOLE], "not": {"const": "a"}}, {"anyOf": [TEXT], "maxLength": 1}, {"not": {"const": "a"}}),
    *({"oneOf": [TEXT, {"const": "a"}]}, {"oneOf": [WHOLE, {"type": "number"}]}, {"oneOf": [{}, TEXT]}),
    *({"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, {"oneOf": [{"enum": [1]}, WHOLE]}, {"minimum": 4}),
    *(False, {"enum": ["a"], "pattern": "b"}, {"enum": ["a", 12], "minimum": 20}, {"const": "a", "enum": ["b"]}),
    *({"enum": ["12", 7]}, {"enum": []}, {"type": "text"}, {"type": []}, {"items": WHOLE}, {"required": ["x"]}),
    *({"type": "array", "items": False}, {"type": "array", "minItems": 2}, {"type": "array", "prefixItems": [TEXT]}),
    *({"type": "object", "additionalProperties": WHOLE}, {"type": "object", "required": ["x"]}),
    *({"type": "object", "properties": {"x": False}}, {"type": "object", "minProperties": 2}),
    *(
        {"type": "object", "properties": {"x": {"pattern": "^b"}}},
        {"type": "object", "patternProperties": {".": WHOLE}},
    ),
    *({"if": TEXT, "then": {"maxLength": 1}}, {"type": "array", "items": {"$ref": "#/$defs/small"}}),
    *({"anyOf": [TEXT, {"properties": {"x": WHOLE}}]}, {"anyOf": [{"items": WHOLE}, {"const": "a"}]}),
]
VALUES: list[Any] = [
    '["a"]',
    *(
        "a",
        "b",
        "aa",
        "zzzz",
        "",
        "12",
        "true",
        "null",
        "[1]",
        "2020-01-01",
        " 7",
        "\n[9]",
        '{"x": 1}',
        "None",
        '["a"]',
    ),
    *(1, 2, 3, 7, 12, -1, 1.5, True, False, None, [], [1], [7], ["a"], [1, 2], {}, {"x": 1}, {"x": "a"}, {"y": 1}),
    *({"x": 1, "y": 2}, {"x": "b"}, {"x": [1]}),
]


def parameters_of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFS}


def accepted(name: str, schema: Any) -> list[Any] | None:
    """The values that are accepted, as they are read back. None: the schema is refused."""
    dialect, tools = DIALECTS[name], [Tool("go", parameters=parameters_of(schema))]
    try:
        lark = grammar(dialect, tools, required=True)
        accepts(lark, "", [])
    except KvarnError as error:
        assert "schema of go" in str(error)  # noqa: PT017
        return None
    except AssertionError:  # llguidance refuses it
        return None
    found = []
    for value in VALUES:
        text = written(dialect, [("go", {"v": value})])
        if accepts(lark, text, []) == "yes":
            parser = Parser(dialect, tools)
            found += said(joined([*parser.push(text), *parser.finish()]))
    return [arguments for _, arguments in found]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_accepted_follows_the_schema(name: str) -> None:
    for schema in ENFORCED:
        validator = jsonschema_rs.validator_for(parameters_of(schema))
        found = accepted(name, schema)
        assert found, f"{name} refuses {schema}"
        assert all(validator.is_valid(each) for each in found), f"{schema}: {found}"


@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_refused_follows_the_schema(name: str) -> None:
    n_refused = 0
    for schema in HARD:
        found = accepted(name, schema)
        n_refused += found is None
        if found:
            validator = jsonschema_rs.validator_for(parameters_of(schema))
            assert all(validator.is_valid(each) for each in found), f"{schema}: {found}"
    assert n_refused


@pytest.mark.parametrize("name", FORMS)
def test_constraints_of_all_arguments_hold(name: str) -> None:
    for more in ({"minProperties": 1}, {"allOf": [{"required": ["a"]}]}, {"patternProperties": {"a": False}}):
        for properties in ({}, {"properties": {"a": WHOLE}}):
            parameters = {"type": "object", **properties, **more}
            validator, tools = jsonschema_rs.validator_for(parameters), [Tool("go", parameters=parameters)]
            try:
                lark = grammar(DIALECTS[name], tools, required=True)
                accepts(lark, "", [])
            except (KvarnError, AssertionError):
                continue
            for arguments in ({}, {"a": 1}):
                if accepts(lark, written(DIALECTS[name], [("go", arguments)]), []) == "yes":
                    assert validator.is_valid(arguments)


@pytest.mark.parametrize("text", ["a</parameter>", "x<parameter=b>", "</function>", "</tool_call>"])
def test_a_listed_text_with_a_marker_is_refused(text: str) -> None:
    tools = [Tool("go", parameters=parameters_of({"enum": ["a", text]}))]
    with pytest.raises(KvarnError, match=r"a value with .* in it in the schema of go\.v"):
        grammar(DIALECTS["qwen3-coder"], tools, required=True)
    quote = DIALECTS["gemma4"].quote
    tools = [Tool("go", parameters=parameters_of({"const": f"a{quote}"}))]
    with pytest.raises(KvarnError, match="a value with"):
        grammar(DIALECTS["gemma4"], tools, required=True)


@pytest.mark.parametrize("key", ["a>b", " a", "", "a\n", "x" * 300])
def test_an_argument_whose_name_cannot_be_read_is_refused(key: str) -> None:
    tools = [Tool("go", parameters={"type": "object", "properties": {key: WHOLE}})]
    for name in ("qwen3-coder", "gemma4", "lfm2"):
        if name == "qwen3-coder" or key not in ("a>b", "x" * 300):
            with pytest.raises(KvarnError, match="an argument with the name"):
                grammar(DIALECTS[name], tools, required=True)


def test_a_schema_that_unfolds_without_end_is_refused_soon() -> None:
    wide = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(10)}
    for schema in ({"type": "object", "properties": wide}, {"anyOf": [{"$ref": "#/$defs/a"}] * 10}):
        parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"a": schema}}
        tools = [Tool("go", parameters=parameters)]
        with pytest.raises(KvarnError, match=r"levels|parts|without end"):
            grammar(DIALECTS["gemma4"], tools, required=True)
        parser = Parser(DIALECTS["qwen3-coder"], tools)
        parser.push(written(DIALECTS["qwen3-coder"], [("go", {"v": 1})]))
        assert said(joined(parser.finish())) is not None


@pytest.mark.parametrize("kind", ["array", ["string", "null"], 3])
def test_arguments_are_an_object(kind: object) -> None:
    for name in FORMS:
        with pytest.raises(KvarnError, match="cannot honour type"):
            Schemas(DIALECTS[name], Lark(()), Tool("go"), {"type": kind})
