"""Compiling: what is accepted token by token, what is refused, and what hostile structures cannot do."""

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from support.structures import compiler, tokenizer, verdict

from kvarn.errors import BadStructure, StructuresBusy
from kvarn.structured import (
    JSON_OBJECT,
    Compiler,
    Structure,
    choice_of,
    either_of,
    embedded_schema,
    grammar_of,
    regex_of,
    schema_of,
)
from kvarn.structured.compiler import bounded

POINT = schema_of(
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "deep": {"enum": ["yes", "no"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("structure", "text", "expected"),
    [
        (POINT, '{"x": 1}', "complete"),
        (POINT, '{"x":1,\n "deep": "no"}', "complete"),
        (POINT, '{"x": 1', "open"),
        (POINT, '{"deep": "no"}', '{"'),
        (POINT, '{"x": 1.5}', '{"x": 1'),
        (POINT, '{"x": 1, "deep": "maybe"}', '{"x": 1, "deep": "'),
        (POINT, '{"x": 1}<|im_end|>', "complete"),
        (POINT, '{"x"<|im_end|>', '{"x"'),
        (POINT, '{"x":<|tool|>', '{"x":'),
        (POINT, "<|endoftext|>", ""),
        (POINT, '{"x":' + " " * 8 + "1}", "complete"),
        (POINT, '{"x":' + " " * 9 + "1}", '{"x":' + " " * 8),
        (JSON_OBJECT, '{"a": [1, {"b": null}]}', "complete"),
        (JSON_OBJECT, "[1]", ""),
        (regex_of(r"\d{2}/[a-c]+"), "12/abc", "accepting"),
        (regex_of(r"\d{2}/[a-c]+"), "12/d", "12/"),
        (regex_of("a{2}"), "aa", "complete"),
        (choice_of(["red", "redder"]), "red", "accepting"),
        (choice_of(["red", "redder"]), "redder", "complete"),
        (choice_of(['"q"\\n\n/\u00fc\U0001f642', "x"]), '"q"\\n\n/\u00fc\U0001f642', "complete"),
        (grammar_of('start: "a" b\nb: /[0-9]/'), "a1", "complete"),
        (grammar_of('root ::= "a" [0-9] | "b" root'), "bba1", "complete"),
        (grammar_of('start: "a" %json {"type": "boolean"}'), "atrue", "complete"),
    ],
)
def test_answers_follow_a_structure_token_by_token(structure: Structure, text: str, expected: str) -> None:
    assert verdict(structure, text) == expected


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, '"not"'),
        (False, "is false, which no answer can follow"),
        ({"minimum": 2**53 + 1}, f"minimum {2**53 + 1}"),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, "exclusiveMaximum -9"),
        ({"type": "number", "maximum": 1e20}, "maximum 1e+20"),
        ({"const": 2**53 + 1}, f"const with {2**53 + 1}"),
        ({"enum": ["a", {"b": [2**64]}]}, f"enum with {2**64}"),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"properties": {"a": {"items": {"if": {}, "then": {}}}}}, '"if", "then"'),
        ({"type": "string", "format": "colour"}, '"format": "colour"'),
        ({"properties": {"a": {"type": "string", "nullable": True}}}, '"nullable"'),
        ({"$defs": {"a": {"x-guidance": {"lenient": True}}}}, '"x-guidance"'),
        ({"minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum: true of draft 4"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#"}, "no answer can follow"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "text"}, "Invalid type: text"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf 999983"),
        ({"type": "integer", "multipleOf": 10**400 + 1}, "multipleOf"),
        ({"type": "integer", "multipleOf": True}, "multipleOf"),
        ({"type": "number", "multipleOf": 9999.83}, "multipleOf 9999.83"),
        ({"type": "integer", "allOf": [{"multipleOf": 967}, {"multipleOf": 1031}]}, "several multipleOf"),
        ({"multipleOf": 967, "anyOf": [{"multipleOf": 1031}]}, "several multipleOf"),
        ({"$defs": {"a": {"multipleOf": 967}}, "$ref": "#/$defs/a", "multipleOf": 1031}, "several multipleOf"),
        ({"allOf": [{"items": {"multipleOf": 967}}, {"items": {"multipleOf": 1031}}]}, "several multipleOf"),
        ({"allOf": [{"multipleOf": 967}, {"multipleOf": 10.31}], "type": "number"}, "several multipleOf"),
        ({"patternProperties": {f"^a{i}$": {} for i in range(65)}}, "patternProperties"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(BadStructure) as refused:
        compiler().compile(schema_of(schema))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("own", ["", embedded_schema({"type": "array"})])
def test_schemas_in_a_grammar_have_the_same_bound_of_white_space(own: str) -> None:
    grammar = grammar_of('start: "x" ' + (own or '%json {"type": "array"}') + ' "y"')
    assert verdict(grammar, "x[" + " " * 8 + "]y") == "complete"
    assert verdict(grammar, "x[" + " " * 9 + "]y") == "x[" + " " * 8
    assert verdict(grammar_of(r'start: "%json {}" "y"'), "%json {}y") == "complete"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "%json {" "y"', "%json {y"),
        ('start: "a\\"%json {}" "y"', 'a"%json {}y'),
        ("start: /%json {2}y/", "%json  y"),
        ('start: /"/ "%json {}"', '"%json {}'),
        ('start: "a" // not %json {"not": {}}, nor "', "a"),
        ('# %json {\nstart: "a"', "a"),
        ('start: "/" "a" "/"', "/a/"),
        ('start: %regex {"substring_words": "%json {"}', "%json {"),
    ],
)
def test_what_only_looks_like_a_schema_in_a_grammar_is_none(grammar: str, text: str) -> None:
    assert verdict(grammar_of(grammar), text) in ("complete", "accepting")


def test_an_answer_follows_one_of_several_structures_with_names_of_their_own() -> None:
    either = either_of(
        grammar_of('  ?start: "(" start ")" | part_1 | VALUE // start: "x"\npart_1: "b"\nVALUE: "c"'),
        grammar_of('start: "(" VALUE "." part_1\nVALUE: /[0-9]+/\npart_1: %json {"type": "boolean"} | <|tool|>'),
        grammar_of('root ::= "g" root | "h"'),
        POINT,
    )
    for text in ("((b))", "(c)", "(12.true", "(12.<|tool|>", "ggh", '{"x": 1}'):
        assert verdict(either, text) == "complete", text
    assert verdict(either, "((1") == "(("
    assert verdict(either, '{"x":' + " " * 9) == '{"x":' + " " * 8


def test_a_model_without_an_end_token_follows_structures() -> None:
    own = Compiler(tokenizer(), ())
    (a,) = tokenizer().encode("a", bos=False)
    state, scores = own.compile(regex_of("a{2}")).start(), np.zeros(tokenizer().vocab_size)
    state.mask(scores, [a])
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [a]
    assert not state.complete([a])
    assert state.complete([a, a])


def test_an_answer_is_one_of_ten_thousand_texts() -> None:
    choices = choice_of([f"text {i}" for i in range(10_000)])
    assert verdict(choices, "text 9999") == "complete"
    assert verdict(choices, "text 100") == "accepting"
    assert verdict(choices, "text 10000") == "text 1000"


def test_thousands_of_alternatives_can_be_followed() -> None:
    words = " | ".join(f'"w{i}"' for i in range(3000))
    assert verdict(grammar_of(f"start: {words}"), "w2999") == "complete"
    with pytest.raises(BadStructure, match="too many alternatives"):
        compiler().compile(grammar_of("start: " + " | ".join(f'"w{i}"' for i in range(4500))))
    optional = schema_of({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(900)}})
    assert verdict(optional, '{"k7": 7, "k899": 8}') == "complete"


def test_several_multiples_are_allowed_where_they_are_not_combined_or_small() -> None:
    apart = {"type": "array", "prefixItems": [{"multipleOf": 967}, {"title": "b", "anyOf": [{"multipleOf": 1031}]}]}
    assert verdict(schema_of(apart), "[967, 1031]") == "complete"
    both = {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}
    assert verdict(schema_of(both), "24") == "accepting"
    assert verdict(schema_of(both), "28") == "open"


def test_numbers_that_are_exact_are_allowed() -> None:
    assert verdict(schema_of({"const": -(2**53)}), str(-(2**53))) == "complete"
    assert verdict(schema_of({"type": "integer", "minimum": 2**53}), str(2**53 - 1)) == "open"
    assert verdict(schema_of({"type": "integer", "minimum": 2**53}), str(2**53)) == "accepting"


def test_keywords_that_restrict_nothing_are_allowed() -> None:
    schema = {"type": "array", "uniqueItems": False, "items": {"type": "array", "uniqueItems": False}}
    assert verdict(schema_of(schema), "[[1]]") == "complete"
    uniqueness = {"type": "object", "properties": {"uniqueItems": {"const": False}}, "required": ["uniqueItems"]}
    assert verdict(schema_of(uniqueness), '{"uniqueItems": false}') == "complete"
    constant = {"const": {"uniqueItems": False}}
    assert verdict(schema_of(constant), '{"uniqueItems": false}') == "complete"


def test_names_of_properties_are_not_keywords() -> None:
    schema = {"type": "object", "properties": {"nullable": {"const": 1}}, "required": ["nullable"]}
    assert verdict(schema_of(schema), '{"nullable":1}') == "complete"


@pytest.mark.parametrize(
    "structure",
    [
        regex_of("[ab"),
        regex_of(r"(a)\1"),
        regex_of("(" * 50_000),
        grammar_of("start: foo"),
        grammar_of("{}"),
        grammar_of("start: <no_such_token>"),
        grammar_of("start: " + "(" * 100_000),
        grammar_of('start: %json {"not": {}}'),
        grammar_of('start: %json {"x-guidance": {"lenient": true}}'),
        grammar_of('start: "a" | %json {"type": "null"} | %json {"$defs": {"a": {"nullable": true}}}'),
        grammar_of('start: /"/ %json {"nullable": true}'),
        grammar_of('start: "a" // "\n  %json {"nullable": true}'),
        grammar_of('start: <"a> %json {"nullable": true}'),
        grammar_of('start: %regex {"substring_words": "\\""} %json {"nullable": true}'),
        grammar_of("start: %json false"),
        grammar_of("start: %json 1"),
        grammar_of('start: "a'),
        grammar_of("start: " + '\\"' * 100_000),
        grammar_of("start: @0"),
        either_of(regex_of("a"), grammar_of("start: @part_0")),
        either_of(regex_of("a"), grammar_of('start: %json {"not": {}}')),
        grammar_of('start: %json {"$ref": '),
        grammar_of("root ::= foo"),
        grammar_of('root ::= ("a"'),
        grammar_of("root ::= " + "(" * 50_000),
    ],
)
def test_bad_expressions_and_grammars_are_refused_in_one_line(structure: Structure) -> None:
    with pytest.raises(BadStructure) as refused:
        compiler().compile(structure)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


def chain(n: int, link: Any) -> dict[str, Any]:
    """A schema that refers to a part that refers to a part, n times."""
    parts = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$defs": parts | {f"d{n}": {"type": "object"}}, "$ref": "#/$defs/d0"}


LINKS = {
    "plain": lambda next: next,
    "object": lambda next: {"type": "object", "properties": {"a": next}, "required": ["a"]},
    "any": lambda next: {"anyOf": [next, {"type": "null"}]},
    "all": lambda next: {"allOf": [next, {"minProperties": 1}]},
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("n", [1000, 5000])
def test_long_chains_of_references_are_compiled_or_refused(link: str, n: int) -> None:
    """llguidance follows them by recursion, and the process would die of a stack overflow."""
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from structured.test_compiler import LINKS, chain
from support.structures import compiler
from kvarn.structured import BadStructure, schema_of
try:
    compiler().compile(schema_of(chain({n}, LINKS[{link!r}])))
except BadStructure as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = "too many references" in done.stdout or "bytes: give at most" in done.stdout
    assert refused if n == 5000 else not done.stdout


def test_long_chains_of_rules_are_refused() -> None:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000))
    with pytest.raises(BadStructure, match="too many rules"):
        compiler().compile(grammar_of(f'start: r0\n{rules}\nr3000: "b"'))


def test_work_that_takes_too_long_is_given_up() -> None:
    gate = threading.Event()
    with pytest.raises(BadStructure, match=r"takes more than 0.01 s to compile"):
        bounded(gate.wait, 0.01)
    gate.set()
    assert bounded(lambda: 7, 10) == 7


def test_work_that_cannot_begin_in_time_is_no_fault_of_the_structure() -> None:
    gate = threading.Event()
    for _ in range(4):
        with pytest.raises(BadStructure):
            bounded(gate.wait, 0.01)
    with pytest.raises(StructuresBusy, match="try again later"):
        bounded(lambda: 7, 0.01)
    gate.set()
    assert bounded(lambda: 7, 10) == 7


def test_any_error_of_the_library_is_a_refusal() -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(BadStructure, match="RuntimeError: a bug"):
        bounded(fails, 10)


def test_equal_structures_are_compiled_once_and_old_ones_are_forgotten() -> None:
    own = Compiler(tokenizer(), tokenizer().eos_ids, most=2)
    first = own.compile(regex_of("a"))
    assert own.compile(regex_of("a")) is first
    own.compile(regex_of("b"))
    assert own.compile(regex_of("a")) is first, "the last use counts"
    own.compile(regex_of("c"))
    assert own.compile(regex_of("a")) is first
    own.compile(regex_of("d"))
    own.compile(regex_of("e"))
    assert own.compile(regex_of("a")) is not first


def test_a_refusal_is_not_remembered_as_a_structure() -> None:
    own = Compiler(tokenizer(), tokenizer().eos_ids)
    for _ in range(2):
        with pytest.raises(BadStructure):
            own.compile(regex_of("["))


def test_threads_compile_at_the_same_time() -> None:
    own = Compiler(tokenizer(), tokenizer().eos_ids)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(own.compile(POINT))) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8


def test_the_library_is_imported_with_the_first_structure() -> None:
    program = "import sys, kvarn.structured, kvarn.llm, kvarn.cli; print('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
